"""First blocks that the client runs itself: everything goes on as if a server held them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.local_blocks import LocalBlocks, LocalSession, describe_route, local_sources, parse_local_blocks
from swarm.data_structures import Hop, Route, Span, StepLayout
from swarm.errors import InvalidSpan, MissingBlocks
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from tests.infos import server_info
from tests.swarms import TestSwarm, run_client, run_swarm, write_digests
from tests.zoo import PROMPTS, make_checkpoint

PAD = 0


def test_local_blocks_can_be_given_in_several_forms() -> None:
    for wanted, span in [
        (None, None),
        (0, None),
        (4, Span(0, 4)),
        ("4", Span(0, 4)),
        ("0:4", Span(0, 4)),
        (Span(0, 4), Span(0, 4)),
        (range(0, 4), Span(0, 4)),
        (slice(4), Span(0, 4)),
    ]:
        assert parse_local_blocks(wanted, 6) == span


def test_invalid_local_blocks_are_refused() -> None:
    for wanted, why in [
        ("1:4", "begin with block 0, as in 0:4"),
        ("0:6", "leaves nothing to the swarm, because the model has 6 blocks"),
        (7, "leaves nothing to the swarm"),
        (-1, "use START:END"),
        ("0:0", "use START:END"),
        ("four", "use a number of blocks"),
        (2.5, "use a number of blocks"),
        (True, "use a number of blocks"),
    ]:
        with pytest.raises(InvalidSpan, match=why):
            parse_local_blocks(wanted, 6)


def test_the_route_is_shown_with_the_local_blocks() -> None:
    route = Route((Hop(server_info(2, 6, "server"), Span(2, 6)),))
    assert describe_route(route, None) == str(route) == "route: 2:6 …server"
    assert describe_route(route, Span(0, 2)) == "route: 0:2 here → 2:6 …server"


rows = st.integers(1, 5)


@given(st.data())
def test_copied_sequences_are_not_copied_again(data: st.DataObject) -> None:
    """After a step that failed behind, the rows here are where those behind will be."""
    behind = list(range(data.draw(rows)))  # a row is what became of it
    places = st.integers(0, len(behind) - 1)
    copied = tuple(data.draw(st.lists(places, min_size=1, max_size=5)))
    here = [behind[source] for source in copied]
    again = tuple(
        copied[place] for place in data.draw(st.lists(st.integers(0, len(copied) - 1), min_size=1, max_size=5))
    )
    sources = local_sources(again, copied)
    assert sources is not None
    assert [here[source] for source in sources] == [behind[source] for source in again]


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_steps_that_failed_at_a_server_are_repeated(span_model: SpanModel, fails: int) -> None:
    """Beams that are copied about, the steps of which fail a few times on their way."""
    generator = torch.Generator().manual_seed(0)
    expected = SessionCache(span_model)
    session: LocalSession = LocalBlocks(span_model).session()
    layouts = [
        StepLayout((0,) * 3, (4,) * 3),
        StepLayout((4,) * 3, (1,) * 3, sources=(2, 0, 0)),
        StepLayout((5,) * 4, (1,) * 4, sources=(1, 1, 0, 2)),
        StepLayout((3,) * 4, (2,) * 4),  # taken back
        StepLayout((5,) * 2, (1,) * 2, sources=(3, 0)),
    ]
    for layout in layouts:
        hidden_RTH = torch.randn(layout.sequences, layout.counts[0], span_model.hidden_size, generator=generator)
        right = expected.step(hidden_RTH.flatten(0, 1), layout).view(hidden_RTH.shape)
        for _ in range(fails):
            session.compute(torch.randn(hidden_RTH.shape, generator=generator), None, layout)
        torch.testing.assert_close(session.compute(hidden_RTH, None, layout), right, rtol=1e-4, atol=1e-4)
        session.confirm()
    assert session.timing is not None


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Nobody in the swarm holds block 0, and a span begins before the client's ends."""
    with run_swarm(folder, ("1:4", "4:6"), dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", local_blocks="0:2", wait_for_blocks=1.0) as model:
        yield model


def batch() -> dict[str, torch.Tensor]:
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[PAD] * (longest - len(row)) + row for row in PROMPTS])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "num_beams": 4, "num_return_sequences": 3},
        {"do_sample": False, "prefill_chunk_size": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_texts_are_those_of_the_local_model(model: Any, local: Any, settings: dict[str, Any]) -> None:
    written = []
    for candidate in (local, model):
        torch.manual_seed(7)
        written.append(candidate.generate(**batch(), max_new_tokens=10, pad_token_id=PAD, **settings).tolist())
    assert written[1] == written[0]


@pytest.mark.parametrize("beams", [3])
def test_lanes(model: Any, local: Any, beams: int) -> None:
    settings = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams, "pad_token_id": PAD}
    assert model.swarm.stage_count() == 3
    expected = local.generate(**batch(), **settings)
    assert model.generate(**batch(), lanes="auto", **settings).tolist() == expected.tolist()


@pytest.mark.parametrize(("start", "end"), [(0, 6), (1, 4)])
def test_hidden_states_of_any_range_of_blocks(model: Any, local: Any, start: int, end: int) -> None:
    hidden = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = local.model.rotary_emb(hidden, torch.arange(5)[None])
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    expected = hidden
    with torch.no_grad():
        for layer in local.model.layers[start:end]:
            expected = layer(expected, position_embeddings=positions, attention_mask=mask)
        result = model.remote_blocks[start:end](hidden)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_timings_and_route_include_the_local_blocks(swarm: TestSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    with run_client(swarm, local_blocks=3, show_route=True) as model, model.inference_session(max_length=8) as session:
        assert session.timings == ()
        session.step(model.word_embeddings(torch.tensor([PROMPTS[0][:3]])))
        assert [hop.span for hop in session.route.hops] == [Span(3, 4), Span(4, 6)]
        # What servers pushed on, they tell the client a moment later.
        deadline = time.monotonic() + 60
        while len(session.timings) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert "route: 0:3 here → 3:4 …" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_server_leaves_local_and_remote_caches_consistent(folder: Path, local: Any) -> None:
    tokens = torch.tensor([PROMPTS[0]])
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": PAD}
    expected = local.generate(tokens, **settings).tolist()
    with (
        run_swarm(folder, ("2:4", "4:6", "4:6"), dtype="float32") as swarm,
        run_client(swarm, dtype="float32", local_blocks=2, wait_for_blocks=1.0) as model,
    ):
        with model.inference_session(max_length=32) as session:
            used = {hop.server.peer_id for hop in session.open().hops}
            step, calls = session.compute, 0

            def compute(*args: Any) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls == 5:  # a server dies, and another one takes its place
                    next(server for server in swarm.servers[1:] if server.peer_id in used).kill()
                if calls == 8:  # nobody is left, until somebody comes
                    next(server for server in swarm.servers[1:] if server.works).kill()
                    for _ in range(2):
                        with pytest.raises(MissingBlocks):
                            step(*args)
                    swarm.start("4:6", dtype="float32").wait_ready()
                return step(*args)

            session.compute = compute
            assert model.generate(tokens, **settings).tolist() == expected
            assert calls > 8
        swarm.servers[:] = [server for server in swarm.servers if server.process.is_alive()]


def test_only_the_weights_of_these_blocks_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, max_shard_size="20KB")
    digests = write_digests(folder, tmp_path / "digests.json")
    with run_swarm(folder, ("3:6",)) as swarm:
        for block in (3, 4, 5):
            for file in _files_of_block_alone(folder, block):
                file.unlink()
        with run_client(swarm, local_blocks="0:3", digests=digests) as model:
            assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3).shape == (1, len(PROMPTS[0]) + 3)
            assert not any(".layers." in name for name, _ in model.named_parameters())


def _files_of_block_alone(folder: Path, block: int) -> list[Path]:
    import json

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    others = {file for name, file in index.items() if f".layers.{block}." not in name}
    return [folder / file for file in set(index.values()) - others]
