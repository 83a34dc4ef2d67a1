"""Texts that are written portion by portion, at servers with room for some of them: the same as in one go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

import pytest

from swarm.client.early_exit.options import EarlyExit
from swarm.client.routes.events import RouteTaken
from swarm.errors import CacheFull
from swarm.generation import sequence_generation
from swarm.generation.prefix_store import PrefixStore
from swarm.generation.prompts import completion_sequences
from swarm.generation.sequence_generation import RoomAwaited, SequenceEnd, SequenceEvent, SequenceGeneration
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.sequence_output import SequenceDelta
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel, add_drafts
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.swarms import TestSwarm, run_client, run_swarm

PORTION = 8
TOKENS = 30
QUOTA = 120
"""Tokens of cache that one peer gets: room for a few portions, or for three whole texts."""

PROMPTS = ("The king said", "Once upon a time", "Fellow citizens", "My dear Watson")


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, ("0:6", "6:12"), cache_tokens=QUOTA * 4 // 3) as running:
        yield running


@pytest.fixture
def served(swarm: TestSwarm, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedModel]:
    monkeypatch.setattr(sequence_generation, "MIN_PORTION_TOKENS", PORTION)
    model = ServedModel.load(str(DEMO_FOLDER), initial_peers=swarm.addresses, wire="none")
    model.prefixes = PrefixStore(0)
    yield model
    model.close()


def whole(served: ServedModel, prompt: str, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> str:
    """What one text is that has all its room from the beginning."""
    with monkeypatch.context() as patched:
        patched.setattr(sequence_generation, "MIN_PORTION_TOKENS", 1 << 20)
        return texts(written(served, [prompt], **asked))[0]


def written(served: ServedModel, prompts: Sequence[str], **asked: Any) -> list[tuple[int, SequenceEvent]]:
    """The events of texts that are written at once."""
    request = SequenceRequest(**{"max_tokens": TOKENS, "temperature": 0.0, **asked})

    async def work() -> list[tuple[int, SequenceEvent]]:
        group = SequenceGroup(served, completion_sequences(served, prompts, request), 1, time.perf_counter())
        async with group.generating(), aclosing(group.events()) as events:
            return [event async for event in events]

    return asyncio.run(work())


def texts(events: Sequence[tuple[int, SequenceEvent]]) -> list[str]:
    found: dict[int, str] = {}
    for index, event in events:
        if isinstance(event, SequenceDelta):
            found[index] = found.get(index, "") + event.text
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({}, id="the likeliest"),
        pytest.param({"temperature": 0.9, "seed": 5, "top_logprobs": 2, "frequency_penalty": 0.5}, id="sampled"),
        pytest.param({"repetition_penalty": 1.3, "stops": ("king",)}, id="with a penalty and a stop"),
        pytest.param({"early_exit": EarlyExit(threshold=0.1)}, id="early exit"),
    ],
)
def test_portions_change_nothing(served, monkeypatch, asked):
    expected = whole(served, PROMPTS[0], monkeypatch, **asked)
    events = written(served, [PROMPTS[0]], **asked)
    assert texts(events) == [expected]
    assert sum(isinstance(event, RouteTaken) for _, event in events) == 1
    assert served.room.holding == 0


def test_drafts_guess_across_portions(served, monkeypatch):
    expected = whole(served, PROMPTS[1], monkeypatch)
    add_drafts([served], ["copies"])
    assert texts(written(served, [PROMPTS[1]])) == [expected]


def test_a_text_goes_on_when_servers_have_taken_its_room_back(served, monkeypatch):
    """And no other has room: in the middle of the second portion."""
    expected, portions, write = whole(served, PROMPTS[2], monkeypatch), [], SequenceGeneration._generate_in

    def write_until_taken_back(self: SequenceGeneration, session: Any, images: Any, portion: int) -> None:
        portions.append(portion)
        if len(portions) == 2:
            write(self, session, images, 3)
            raise CacheFull("others need it")
        write(self, session, images, portion)

    monkeypatch.setattr(SequenceGeneration, "_generate_in", write_until_taken_back)
    assert texts(written(served, [PROMPTS[2]])) == [expected]
    assert portions == [8, 8, 11, 8]


def test_more_texts_than_there_is_room_for(served, monkeypatch):
    """Eight, of which three fit as a whole."""
    expected = [whole(served, prompt, monkeypatch) for prompt in PROMPTS]
    events = written(served, PROMPTS * 2)
    assert texts(events) == expected * 2
    assert any(isinstance(event, RoomAwaited) for _, event in events)
    assert [event.reason for _, event in events if isinstance(event, SequenceEnd)] == ["length"] * 8
    assert (served.room.holding, served.room.is_empty) == (0, True)


def test_a_text_longer_than_servers_take_ends_there(served, monkeypatch):
    """It asks for more than a peer may have, and is cut there; a prompt of which that is so is refused."""
    events = written(served, [PROMPTS[0]], max_tokens=500)
    assert [event.reason for _, event in events if isinstance(event, SequenceEnd)] == ["length"]
    assert len(texts(events)[0]) > 2 * len(whole(served, PROMPTS[0], monkeypatch))


def test_without_hope_of_room_a_text_gives_up(served, swarm, monkeypatch):
    """Other peers have all of it, and this one wants more than others have to give it."""
    monkeypatch.setattr(sequence_generation, "ROOM_TIMEOUT_S", 0.5)
    with ExitStack() as stack:
        for length in (QUOTA, QUOTA // 3):
            stack.enter_context(stack.enter_context(run_client(swarm)).inference_session(max_length=length)).open()
        with pytest.raises(CacheFull):
            written(served, ["Once upon a time " * 8])
    assert texts(written(served, PROMPTS[:1]))
