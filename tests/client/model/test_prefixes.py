"""Prefixes that are computed once: a session begins with what an earlier one has left at its servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.client.chain.prefix import Prefix
from swarm.client.routes.events import HopLost, Replayed, SessionEvent
from swarm.errors import UsageError
from tests import zoo
from tests.client.conftest import SPANS
from tests.client.prompts import padded_batch, prompt
from tests.swarms import TestSwarm, run_client, run_swarm

NEW = 12


def greedy(model: Any, tokens: torch.Tensor, new: int = NEW, **more: Any) -> torch.Tensor:
    """The text with `new` greedy tokens behind it, whatever they are."""
    settings = {"attention_mask": torch.ones_like(tokens), "min_new_tokens": new, "max_new_tokens": new, **more}
    written: torch.Tensor = model.generate(tokens, do_sample=False, pad_token_id=0, **settings)
    return written


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Each span twice."""
    with run_swarm(folder, SPANS * 2, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


def left(model: Any, tokens: torch.Tensor, new: int = NEW) -> tuple[torch.Tensor, Prefix]:
    """A text, and what its session has left: all but the last token, which was not computed."""
    session = model.inference_session(max_length=200)
    text = greedy(model, tokens, new, session=session)
    prefix = session.park()
    assert prefix is not None
    assert len(prefix) == text.shape[1] - 1
    return text, prefix


def next_turn(
    model: Any, prefix: Prefix, tokens: torch.Tensor, **more: Any
) -> tuple[list[int], int, list[SessionEvent]]:
    """The text behind a prompt that begins with a prefix, how much of that was there, and what happened."""
    events: list[SessionEvent] = []
    with model.inference_session(max_length=200, listener=events.append, prefix=prefix) as session:
        text = greedy(model, tokens, NEW, **more)[0].tolist()
        return text, session.begun, events


def replayed(events: list[SessionEvent]) -> list[tuple[str, int]]:
    return [(str(event.span), event.tokens) for event in events if isinstance(event, Replayed)]


def test_a_conversation_goes_on_where_it_was_left(model: Any, local: Any) -> None:
    """Six turns: each begins with all that was computed before, and says what it would have said."""
    text, prefix = left(model, prompt(20))
    for turn in range(5):
        tokens = torch.cat([text, prompt(6, seed=turn)], dim=1)
        with model.inference_session(max_length=300, prefix=prefix) as session:
            text = greedy(model, tokens, NEW)
            assert session.begun == len(prefix)
            prefix = session.park()
        assert text.tolist() == greedy(local, tokens, NEW).tolist()


def test_forks_share_what_they_have_in_common(model: Any, local: Any) -> None:
    """Another answer, an edited question, and what goes on: whatever the others left or are still doing."""
    text, prefix = left(model, prompt(40))
    again, edited, onward = (
        text[:, :40],
        torch.cat([text[:, :30], prompt(9)], dim=1),
        torch.cat([text, prompt(5)], dim=1),
    )
    for tokens, common in ((onward, len(prefix)), (again, 39), (edited, 30), (onward, len(prefix))):
        written, begun, events = next_turn(model, prefix.first(common), tokens)
        assert written == greedy(local, tokens, NEW)[0].tolist()
        assert (begun, replayed(events)) == (common, [])


def test_a_longer_text_has_the_shorter_ones_in_it(model: Any, local: Any) -> None:
    """What a session began with is kept once: in what it has left."""
    text, prefix = left(model, prompt(30))
    before = [one.session_id for one in prefix.source.hops]
    tokens = torch.cat([text, prompt(5)], dim=1)
    session = model.inference_session(max_length=200, prefix=prefix)
    longer = greedy(model, tokens, NEW, session=session)
    later = session.park()
    assert later is not None
    assert [one.session_id for one in prefix.source.hops] == [one.session_id for one in later.source.hops] != before
    for known, onward in ((prefix, tokens), (later, torch.cat([longer, prompt(4)], dim=1))):
        written, begun, events = next_turn(model, known, onward)
        assert (begun, replayed(events)) == (len(known), [])
        assert written == greedy(local, onward, NEW)[0].tolist()


def test_an_open_session_can_be_copied(model: Any, local: Any) -> None:
    """Two texts at once begin with what a session has left that goes on."""
    text, prefix = left(model, prompt(30))
    tokens = torch.cat([text, prompt(5)], dim=1)
    with model.inference_session(max_length=200, prefix=prefix) as first:
        greedy(model, tokens, 2)
        prefix.source.hops = tuple(
            replace(one, session_id=hop.session_id)
            for one, hop in zip(prefix.source.hops, first._chain._hops.hops, strict=True)
        )
        written, begun, events = next_turn(model, prefix, tokens)
        assert (begun, replayed(events)) == (len(prefix), [])
        assert written == greedy(local, tokens, NEW)[0].tolist()


def test_with_guesses(model: Any, local: Any, always_guess: None) -> None:
    session = model.inference_session(max_length=200)
    text = greedy(model, prompt(30), NEW, session=session, draft="copies")
    prefix = session.park()
    assert prefix is not None
    tokens = torch.cat([text, prompt(5)], dim=1)
    written, begun, _ = next_turn(model, prefix, tokens, draft="copies")
    assert begun == text.shape[1] - 1
    assert written == greedy(local, tokens, NEW)[0].tolist()


@pytest.mark.parametrize("lost", range(len(SPANS)))
def test_correct_after_the_loss_of_any_server(folder: Path, local: Any, lost: int) -> None:
    """A server that left its part behind dies before the next turn. This client replays it to another one."""
    with (
        run_swarm(folder, SPANS * 2, dtype="float32") as swarm,
        run_client(swarm, wire="none", dtype="float32") as model,
    ):
        text, prefix = left(model, prompt(30))
        part = prefix.source.hops[lost]
        swarm.server(part.hop.server.peer_id).kill()
        tokens = torch.cat([text, prompt(5)], dim=1)
        written, begun, events = next_turn(model, prefix, tokens)
        assert written == greedy(local, tokens, NEW)[0].tolist()
        assert begun == len(prefix)
        assert [str(event.span) for event in events if isinstance(event, HopLost)] == [str(part.hop.span)]
        assert replayed(events) == [(str(part.hop.span), len(prefix))]


def test_correct_after_a_loss_in_the_middle(folder: Path, local: Any) -> None:
    """A server dies in a turn that began with a prefix: its history has that, too."""
    with (
        run_swarm(folder, SPANS * 2, dtype="float32") as swarm,
        run_client(swarm, wire="none", dtype="float32") as model,
    ):
        text, prefix = left(model, prompt(30))
        tokens = torch.cat([text, prompt(5)], dim=1)
        with model.inference_session(max_length=200, prefix=prefix) as session:
            assert session.begun == len(prefix)
            swarm.server(session.route.hops[1].server.peer_id).kill()
            assert greedy(model, tokens, NEW).tolist() == greedy(local, tokens, NEW).tolist()
            more = torch.cat([greedy(local, tokens, NEW), prompt(3)], dim=1)
            parked = session.park()
        assert parked is not None
        assert next_turn(model, parked, more)[0] == greedy(local, more, NEW)[0].tolist()


def test_servers_that_have_forgotten_all(folder: Path, local: Any) -> None:
    """If no server has the prefix any more, it is computed again: that moves less than filling each one."""
    with run_swarm(folder, SPANS, dtype="float32") as swarm, run_client(swarm, wire="none", dtype="float32") as model:
        text, prefix = left(model, prompt(30))
        prefix.source.hops = tuple(replace(one, session_id=bytes(16)) for one in prefix.source.hops)
        tokens = torch.cat([text, prompt(5)], dim=1)
        written, begun, events = next_turn(model, prefix, tokens)
        assert (begun, replayed(events)) == (0, [])
        assert written == greedy(local, tokens, NEW)[0].tolist()


@pytest.mark.parametrize("family", ["qwen3_next", "gpt2", "mistral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """States, learned positions, sliding windows: what cannot be set back is computed again."""
    folder = zoo.make_checkpoint(family, tmp_path)
    with (
        run_swarm(folder, ("0:3", "3:6"), dtype="float32") as swarm,
        run_client(swarm, wire="none", dtype="float32") as model,
    ):
        text, prefix = left(model, prompt(30))
        onward, again = torch.cat([text, prompt(5)], dim=1), text[:, :30]
        for tokens, length in ((onward, len(prefix)), (again, 29)):
            expected = greedy(model, tokens, NEW)[0].tolist()
            written, begun, _ = next_turn(model, prefix.first(length), tokens)
            assert written == expected
            assert begun == length or family == "qwen3_next"


def test_local_blocks_have_it_too(folder: Path, local: Any) -> None:
    with (
        run_swarm(folder, ("0:6",), dtype="float32") as swarm,
        run_client(swarm, wire="none", dtype="float32", local_blocks="0:2") as model,
    ):
        text, prefix = left(model, prompt(30))
        tokens = torch.cat([text, prompt(5)], dim=1)
        assert next_turn(model, prefix, tokens)[:2] == (greedy(local, tokens, NEW)[0].tolist(), len(prefix))


def test_another_adapter_begins_with_nothing(swarm: TestSwarm) -> None:
    """What was computed with other factors is not what these give; with the same ones it is used."""
    with run_client(swarm, dtype="float32", wire="none", tuning_mode="lora") as model:
        text, prefix = left(model, prompt(30))
        tokens = torch.cat([text, prompt(5)], dim=1)
        assert next_turn(model, prefix, tokens)[1] == len(prefix)
        with torch.no_grad():
            for parameter in model.lora.parameters():
                parameter += 0.05
        written, begun, _ = next_turn(model, prefix, tokens)
        assert begun == 0
        assert written == greedy(model, tokens)[0].tolist()


def test_what_cannot_be_kept(model: Any) -> None:
    session = model.inference_session(max_length=200)
    assert session.park() is None  # nothing was computed
    session = model.inference_session(max_length=200)
    model.generate(session=session, max_new_tokens=2, **padded_batch())
    assert session.park() is None
    _, prefix = left(model, prompt(30))
    with model.inference_session(max_length=200) as session:
        session.open()
        with pytest.raises(UsageError, match="is open"):
            session.begin_with(prefix)
