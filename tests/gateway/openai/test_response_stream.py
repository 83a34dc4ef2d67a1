"""From the events of a request's sequences to its response."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.client.routes.events import BlocksMissing, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.gateway.openai.response_stream import ResponseChunk, ResponseDetail, complete_response, stream_response
from swarm.gateway.openai.response_writers import ChatResponseWriter
from swarm.generation.sequence_generation import SequenceEnd, SequenceFailed
from tests.generation.fake_generation import make_group
from tests.infos import server_info

__all__ = ["make_group"]

ROUTE = Route((Hop(server_info(0, 4, "abcdefgh", name="ann"), Span(0, 4)),))


def test_a_response_does_not_begin_while_blocks_are_missing(make_group):
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


def test_an_empty_answer_still_begins(make_group):
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


def test_a_complete_response_is_written_outside_of_the_event_loop(make_group, monkeypatch):
    threads = []
    monkeypatch.setattr(ChatResponseWriter, "body", lambda *_: threads.append(threading.current_thread()) or {})

    async def work() -> None:
        one = make_group(1)
        one._generations[0].on_event(SequenceEnd("stop", 1))
        await complete_response(one, ChatResponseWriter("m", None), with_details=False)

    asyncio.run(work())
    assert threads != [threading.current_thread()]
