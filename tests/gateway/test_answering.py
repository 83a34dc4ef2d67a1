"""What comes of several sequences, and what is told of a session on its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.client.routes.events import BlocksMissing, HopLost, PeerAvoided, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.gateway.answering import Answering, Chunk, Detail, detail, joined
from swarm.gateway.failures import Unavailable
from swarm.gateway.generation import Delta, End, Failed, News, Work
from swarm.gateway.replies import ChatReplies
from swarm.generation.sampling import Chosen, Sampling
from swarm.generation.tool_calls import ToolCall
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import new_registry
from tests.infos import server_info


def test_pieces_that_wait_together_become_one():
    call = ToolCall("f", "{}")
    waiting = [
        (0, Delta("a", (), (Chosen(1),))),
        (0, Delta("b", (call,), (Chosen(2),))),
        (1, Delta("x")),
        (0, Delta("c")),
        (0, End("stop", 3)),
    ]
    assert joined(waiting) == [
        (0, Delta("ab", (call,), (Chosen(1), Chosen(2)))),
        (1, Delta("x")),
        (0, Delta("c")),
        (0, End("stop", 3)),
    ]


ROUTE = Route((Hop(server_info(0, 4, "abcdefgh", name="ann"), Span(0, 4)),))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (RouteTaken(ROUTE), {"kind": "route", "hops": [{"blocks": "0:4", "peer": "…cdefgh", "name": "ann"}]}),
        (HopLost("abcdefgh", Span(0, 4), "peer_lost"),
         {"kind": "lost", "peer": "…cdefgh", "blocks": "0:4", "reason": "peer_lost"}),
        (BlocksMissing((0, 1, 5)), {"kind": "missing", "blocks": "0:2, 5:6"}),
        (Recovered(0.06789), {"kind": "recovered", "seconds": 0.068}),
        (Replayed(Span(0, 4), 9), None),
        (PeerAvoided("a", "fault", 1.0), None),
        (Delta("a"), None),
    ],
)  # fmt: skip
def test_details(event, told):
    assert detail(event) == told


class Sequence:
    """Stands for a generation; a prompt `[n]` starts as a thread if n is above 0."""

    tokens = 0

    def __init__(self, model: Any, tokenizer: Any, baton: Any, ends: Any, work: Work, hear: Callable[[News], None]):
        self.works = work.prompt[0] > 0
        self.hear = hear
        self.running = False

    def start(self) -> None:
        if not self.works:
            raise RuntimeError("can't start new thread")
        self.running = True

    def cancel(self) -> None:
        self.running = False

    async def ended(self) -> None:
        assert self.works


@pytest.fixture
def answering(monkeypatch):
    monkeypatch.setattr("swarm.gateway.answering.Generation", Sequence)

    def make(*prompts: int) -> Answering:
        served: Any = SimpleNamespace(name="m", model=None, tokenizer=None, baton=None, ends=())
        works = [Work([prompt], 1, Sampling()) for prompt in prompts]
        return Answering(served, works, ChatReplies("m", None), 1, 0.0, GatewayMetrics(new_registry()))

    return make


def test_a_reply_has_not_begun_while_its_blocks_are_waited_for(answering):
    async def work() -> None:
        one = answering(1)
        (sequence,) = one._generations
        for news in (RouteTaken(ROUTE), BlocksMissing((1,)), Failed(Unavailable("nobody"))):
            sequence.hear(news)
        told: list[Chunk | Detail] = []

        async def read() -> None:
            async for part in one.stream(include_usage=False):
                told.append(part)

        with pytest.raises(Unavailable):
            await read()
        assert [part.body["kind"] for part in told if isinstance(part, Detail)] == ["route", "missing"]
        assert not any(isinstance(part, Chunk) for part in told)

    asyncio.run(work())


def test_an_answer_of_nothing_still_begins(answering):
    async def work() -> None:
        one = answering(1)
        one._generations[0].hear(End("stop", 1))
        parts = [part.body async for part in one.stream(include_usage=False) if isinstance(part, Chunk)]
        assert [part["choices"][0]["delta"] for part in parts] == [{"role": "assistant", "content": ""}, {}]

    asyncio.run(work())


def test_where_there_are_too_few_threads_those_that_run_are_ended(answering):
    async def work() -> None:
        one = answering(1, 2, 0, 3)
        with pytest.raises(RuntimeError, match="new thread"):
            async with one.running():
                raise AssertionError
        assert not any(sequence.running for sequence in one._generations)

    asyncio.run(work())


def test_a_whole_reply_is_not_written_in_the_event_loop(answering, monkeypatch):
    threads = []
    monkeypatch.setattr(ChatReplies, "whole", lambda *_: threads.append(threading.current_thread()) or {})

    async def work() -> None:
        one = answering(1)
        one._generations[0].hear(End("stop", 1))
        await one.whole()

    asyncio.run(work())
    assert threads != [threading.current_thread()]
