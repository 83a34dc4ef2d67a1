"""Tokens that leave inside spans that the client has cut: real servers, whose caches are those of the full model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from swarm import EarlyExit
from swarm.client.routes.events import ExitTaken, ExitVerified, HopLost
from swarm.errors import InvalidSpan, UsageError
from tests.client.prompts import PAD, greedy, padded_batch, prompt
from tests.disturbances import Before, holder
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("always_look")

TWO_PARTS, FOUR_PARTS = (3,), (1, 2, 4)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[TestSwarm]:
    """One server with all blocks."""
    with run_swarm(folder, ["0:6"], dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def client(alone: TestSwarm) -> Iterator[Any]:
    """A client of the lone server."""
    with run_client(alone, dtype="float32", wire="none") as model:
        yield model


def leaves(boundaries: tuple[int, ...], **more: Any) -> EarlyExit:
    """Nearly all tokens leave at the first boundary."""
    return EarlyExit(**{"threshold": 0.0, "boundaries": boundaries, **more})


def spans(session: Any) -> list[str]:
    return [str(hop.span) for hop in session.route.hops]


@pytest.mark.parametrize("boundaries", [TWO_PARTS, FOUR_PARTS])
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_texts_of_one_server_are_those_of_the_full_model(client, local, boundaries, threshold):
    """Where this process is slow, answers come before it can look; then the text is generated again."""
    expected, events = greedy(local, prompt()), []

    def some_were_wrong() -> bool:
        with client.inference_session(max_length=64, listener=events.append):
            exits = leaves(boundaries, threshold=threshold)
            assert greedy(client, prompt(), early_exit=exits).equal(expected)
        return any(isinstance(event, ExitVerified) and not event.stands for event in events)

    wait_until(some_were_wrong)
    assert {event.block for event in events if isinstance(event, ExitTaken)} <= set(boundaries)


@pytest.mark.parametrize("batch", ["row", "all"])
def test_padded_batches(client, local, batch):
    """Four sequences."""
    inputs = {name: torch.cat([value, value])[:4] for name, value in padded_batch().items()}
    assert len(inputs["input_ids"]) == 4
    assert greedy(client, **inputs, early_exit=leaves(FOUR_PARTS, batch=batch)).equal(greedy(local, **inputs))


@pytest.mark.parametrize("boundaries", [(1, 4), (1, 4, 5)])
def test_servers_of_a_route_are_cut_as_well(swarm, model, local, boundaries):
    with model.inference_session(max_length=64, early_exit=(exits := leaves(boundaries))) as session:
        assert greedy(model, prompt()).equal(greedy(local, prompt()))
        assert spans(session)[:3] == ["0:1", "1:2", "2:3"]
        assert session.boundaries_for(exits) == tuple(sorted({*boundaries, 2, 3}))


def test_without_verification_tokens_stand_and_the_text_goes_on_from_exact_caches(client, local):
    events: list[Any] = []
    exits = leaves(TWO_PARTS, verify=False)
    with client.inference_session(max_length=96, listener=events.append, early_exit=exits):
        early = greedy(client, prompt(), 12)
        assert sum(isinstance(event, ExitTaken) for event in events) >= 10
        assert not early.equal(greedy(local, prompt(), 12))
        assert greedy(client, early, 8, early_exit=None).equal(greedy(local, early, 8))


def test_sampled_texts_with_a_temperature_near_zero_are_greedy(client, local):
    """Verification replaces what was drawn early and is not what the full model draws."""
    torch.manual_seed(0)
    found = client.generate(
        prompt(),
        max_new_tokens=24,
        do_sample=True,
        temperature=1e-4,
        top_k=0,
        pad_token_id=PAD,
        early_exit=leaves(FOUR_PARTS),
    )
    assert found.equal(greedy(local, prompt()))


@pytest.mark.slow
@pytest.mark.parametrize("verify", [True, False])
def test_a_server_is_lost_in_the_middle(folder, local, verify):
    events: list[Any] = []
    killed: list[str] = []
    with run_swarm(folder, ["0:6", "0:6"], dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:

        def kill(session: Any) -> None:
            events.clear()  # where a server was slow, the other one may have taken its place before
            server = holder(swarm, session, 2)
            server.kill()
            killed.append(server.peer_id)

        exits = leaves(FOUR_PARTS, verify=verify)
        with model.inference_session(max_length=96, listener=events.append, early_exit=exits) as session:
            before = Before(session, {12: kill})
            text = greedy(model, prompt(), stopping_criteria=StoppingCriteriaList([before]))
            assert spans(session) == ["0:1", "1:2", "2:4", "4:6"]
            lost = [(event.peer_id, str(event.span)) for event in events if isinstance(event, HopLost)]
            assert lost == [(killed[0], "0:6")]
            if verify:
                assert text.equal(greedy(local, prompt()))
            longer = torch.cat([text, prompt(3, seed=5)], dim=1)
            settings = {"new": 6, "attention_mask": torch.ones_like(longer)}  # the text may have the padding token
            assert greedy(model, longer, early_exit=None, **settings).equal(greedy(local, longer, **settings))


def test_a_session_that_has_computed_cannot_be_cut_any_more(client, local):
    with client.inference_session(max_length=64) as session:
        session.open()
        text = greedy(client, prompt(), 4, early_exit=leaves(TWO_PARTS))
        before = session.position
        assert spans(session) == ["0:3", "3:6"]
        longer = torch.cat([text, prompt(3, seed=5)], dim=1)
        with pytest.raises(UsageError, match="pass early_exit to inference_session as well"):
            greedy(client, longer, 4, early_exit=leaves((2,)))
        with pytest.raises(UsageError, match="use another session"):
            greedy(client, prompt(), 4, early_exit=leaves((2,)))
        assert session.position == before, "what is refused changes nothing"
        assert greedy(client, longer, 4, early_exit=leaves(TWO_PARTS)).equal(greedy(local, longer, 4))


def test_a_call_looks_only_where_it_says(client):
    """The session is cut at two blocks, for another call."""
    events: list[Any] = []
    with client.inference_session(max_length=64, listener=events.append, early_exit=leaves((1, 4))) as session:
        greedy(client, prompt(), 8, early_exit=leaves((4,), verify=False))
        assert spans(session) == ["0:1", "1:4", "4:6"]
        assert {event.block for event in events if isinstance(event, ExitTaken)} == {4}
        assert session.boundaries_for(leaves((1,))) == (1,)
        assert session.boundaries_for(EarlyExit()) == ()


def test_servers_let_no_tokens_leave_inside_spans_that_are_cut(client):
    project = EarlyExit(threshold=0.0, verify=False, fill="project")
    with client.inference_session(max_length=64, early_exit=leaves(TWO_PARTS)) as session:
        with pytest.raises(UsageError, match=r"boundaries=\(3,\), which do not go together with .* fill='project'"):
            greedy(client, prompt(), 4, early_exit=project)
        assert session.position == 0
    with (
        client.inference_session(max_length=64, early_exit=project),
        pytest.raises(UsageError, match="use another session"),
    ):
        greedy(client, prompt(), 4, early_exit=leaves(TWO_PARTS))


def test_boundaries_outside_the_model_are_named(client):
    for boundary in (6, 40):
        with pytest.raises(InvalidSpan, match="use blocks from 1 to 5"):
            greedy(client, prompt(), early_exit=leaves((boundary,)))
    with pytest.raises(InvalidSpan):
        client.inference_session(max_length=8, early_exit=leaves((6,)))


def test_a_client_looks_behind_its_own_blocks_but_not_inside_them(alone, local):
    """What leaves there has not travelled anywhere."""
    events: list[Any] = []
    expected = greedy(local, prompt())
    with run_client(alone, dtype="float32", local_blocks="0:2") as model:

        def some_left_behind_its_own() -> bool:
            with model.inference_session(max_length=64, listener=events.append):
                assert greedy(model, prompt(), early_exit=leaves((2, 4))).equal(expected)
            return any(isinstance(event, ExitTaken) and event.block == 2 for event in events)

        wait_until(some_left_behind_its_own)
        assert greedy(model, prompt(), early_exit=leaves((4,), min_block=3)).equal(expected)
        with pytest.raises(InvalidSpan, match=r"boundaries=\[1\] are not among blocks 2:6.* use blocks from 2 to 5"):
            greedy(model, prompt(), early_exit=leaves((1, 2, 3)))


def test_one_server_without_boundaries_is_named_in_the_log(client, caplog):
    with caplog.at_level(logging.WARNING):
        greedy(client, prompt(), 4, early_exit=EarlyExit(threshold=0.0))
    assert "one server has all blocks, and boundaries names none of them" in caplog.text
    caplog.clear()
    greedy(client, prompt(), 4, early_exit=leaves(TWO_PARTS))
    assert "early_exit" not in caplog.text
