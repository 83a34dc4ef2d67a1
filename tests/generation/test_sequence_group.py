"""The sequences of a request together, and the response that their events become."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.client.routes.events import BlocksMissing, HopLost, PeerAvoided, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.gateway.openai.response_stream import ResponseChunk, ResponseDetail, complete_response, stream_response
from swarm.gateway.openai.response_writers import ChatResponseWriter
from swarm.generation.route_details import route_detail
from swarm.generation.sampling import SampledToken, SamplingOptions
from swarm.generation.sequence_generation import (
    SequenceDelta,
    SequenceEnd,
    SequenceEvent,
    SequenceFailed,
    SequenceRequest,
)
from swarm.generation.sequence_group import SequenceGroup, merge_deltas
from swarm.generation.tool_calls import ToolCall
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import new_registry
from tests.infos import server_info


def test_pieces_that_wait_together_become_one():
    call = ToolCall("f", "{}")
    waiting = [
        (0, SequenceDelta("a", (), (SampledToken(1),))),
        (0, SequenceDelta("b", (call,), (SampledToken(2),))),
        (1, SequenceDelta("x")),
        (0, SequenceDelta("c")),
        (0, SequenceEnd("stop", 3)),
    ]
    assert merge_deltas(waiting) == [
        (0, SequenceDelta("ab", (call,), (SampledToken(1), SampledToken(2)))),
        (1, SequenceDelta("x")),
        (0, SequenceDelta("c")),
        (0, SequenceEnd("stop", 3)),
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
        (SequenceDelta("a"), None),
    ],
)  # fmt: skip
def test_details(event, told):
    assert route_detail(event) == told


class FakeGeneration:
    """Stands for a generation; a prompt `[n]` starts as a thread if n is above 0."""

    tokens = 0

    def __init__(self, served: Any, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]):
        self.works = request.prompt[0] > 0
        self.on_event = on_event
        self.running = False

    def start(self) -> None:
        if not self.works:
            raise RuntimeError("can't start new thread")
        self.running = True

    def cancel(self) -> None:
        self.running = False

    async def wait_ended(self) -> None:
        assert self.works


@pytest.fixture
def make_group(monkeypatch):
    monkeypatch.setattr("swarm.generation.sequence_group.SequenceGeneration", FakeGeneration)

    def make(*prompts: int) -> SequenceGroup:
        served: Any = SimpleNamespace(name="m")
        requests = [SequenceRequest([prompt], 1, SamplingOptions()) for prompt in prompts]
        return SequenceGroup(served, requests, 1, 0.0, GatewayMetrics(new_registry()))

    return make


def test_a_reply_has_not_begun_while_its_blocks_are_waited_for(make_group):
    async def work() -> None:
        one = make_group(1)
        (sequence,) = one._generations
        for news in (RouteTaken(ROUTE), BlocksMissing((1,)), SequenceFailed(MissingBlocks((1,)))):
            sequence.on_event(news)
        told: list[ResponseChunk | ResponseDetail] = []

        async def read() -> None:
            async for part in stream_response(one, ChatResponseWriter("m", None), include_usage=False):
                told.append(part)

        with pytest.raises(MissingBlocks):
            await read()
        assert [part.body["kind"] for part in told if isinstance(part, ResponseDetail)] == ["route", "missing"]
        assert not any(isinstance(part, ResponseChunk) for part in told)

    asyncio.run(work())


def test_an_answer_of_nothing_still_begins(make_group):
    async def work() -> None:
        one = make_group(1)
        one._generations[0].on_event(SequenceEnd("stop", 1))
        parts = [
            part.body
            async for part in stream_response(one, ChatResponseWriter("m", None), include_usage=False)
            if isinstance(part, ResponseChunk)
        ]
        assert [part["choices"][0]["delta"] for part in parts] == [{"role": "assistant", "content": ""}, {}]

    asyncio.run(work())


def test_where_there_are_too_few_threads_those_that_run_are_ended(make_group):
    async def work() -> None:
        one = make_group(1, 2, 0, 3)
        with pytest.raises(RuntimeError, match="new thread"):
            async with one.generating():
                raise AssertionError
        assert not any(sequence.running for sequence in one._generations)

    asyncio.run(work())


def test_a_whole_reply_is_not_written_in_the_event_loop(make_group, monkeypatch):
    threads = []
    monkeypatch.setattr(ChatResponseWriter, "body", lambda *_: threads.append(threading.current_thread()) or {})

    async def work() -> None:
        one = make_group(1)
        one._generations[0].on_event(SequenceEnd("stop", 1))
        await complete_response(one, ChatResponseWriter("m", None), with_details=False)

    asyncio.run(work())
    assert threads != [threading.current_thread()]
