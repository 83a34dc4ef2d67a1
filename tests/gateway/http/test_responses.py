"""Streams of events, and work that ends when its client disconnects, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import pytest

from swarm.gateway.http.responses import (
    SIGN_OF_LIFE,
    ClientDisconnected,
    StreamResponse,
    begun,
    cancel_on_disconnect,
    kept_alive,
)
from swarm.gateway.openai.api_errors import BadRequest, ServiceUnavailable
from swarm.gateway.openai.dialect import Dialect, StreamEvent
from tests import virtual_time
from tests.gateway.http.fake_client import Client, run


def test_work_ends_when_its_client_leaves():
    async def work() -> None:
        client, ended = Client(), asyncio.Event()

        async def long() -> None:
            try:
                client.left.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(ClientDisconnected):
            await cancel_on_disconnect(client.receive, long())
        assert ended.is_set()

    run(work)


def test_work_that_is_done_or_fails():
    async def work() -> None:
        async def fails() -> None:
            raise BadRequest("no")

        async def answers() -> int:
            return 7

        assert await cancel_on_disconnect(Client().receive, answers()) == 7
        with pytest.raises(BadRequest):
            await cancel_on_disconnect(Client().receive, fails())

    run(work)


DIALECT = Dialect()
A, B = StreamEvent({"a": 1}), StreamEvent({"b": 2})


class Stream:
    """A stream of events, and how it ended."""

    def __init__(self, events: Iterable[StreamEvent | Exception], waits: bool = False) -> None:
        self.closed = False
        self.over: list[bool] = []
        self._events = list(events)
        self._waits = waits

    async def events(self) -> AsyncGenerator[StreamEvent]:
        try:
            for one in self._events:
                if isinstance(one, Exception):
                    raise one
                yield one
            if self._waits:
                await asyncio.Event().wait()
        finally:
            self.closed = True

    async def send_to(self, client: Client, send_timeout_s: float = 5.0) -> None:
        async def over(was_read: bool) -> None:
            assert self.closed
            self.over.append(was_read)

        response = StreamResponse(self.events(), DIALECT, send_timeout_s, over)
        await response(client.scope, client.receive, client.send)


def test_a_stream_is_sent_as_it_comes():
    async def work() -> None:
        client, stream = Client(), Stream([A, B])
        await stream.send_to(client)
        bodies = [message.get("body") for message in client.got]
        assert bodies == [None, DIALECT.event(A), DIALECT.event(B), b"data: [DONE]\n\n", b""]
        assert [message.get("more_body") for message in client.got] == [None, True, True, True, False]
        assert stream.over == [True]

    run(work)


def test_an_error_in_the_middle_is_an_event():
    async def work() -> None:
        client, stream = Client(), Stream([A, ServiceUnavailable("gone", code="x")])
        await stream.send_to(client)
        failure = {"message": "gone", "type": "server_error", "param": None, "code": "x"}
        assert client.body == DIALECT.event(A) + DIALECT.event(StreamEvent({"error": failure}))
        assert stream.over == [True]

    run(work)


def test_a_bug_in_the_middle_is_an_event_without_its_details():
    async def work() -> None:
        client, stream = Client(), Stream([A, KeyError("secret")])
        await stream.send_to(client)
        assert client.body.startswith(DIALECT.event(A) + b'data: {"error":{"message":"the gateway failed')
        assert b"secret" not in client.body
        assert (stream.closed, stream.over) == (True, [True])

    run(work)


def test_a_client_that_disconnects_ends_the_stream():
    async def work() -> None:
        client, stream = Client(), Stream([A], waits=True)
        sending = asyncio.ensure_future(stream.send_to(client))
        while not client.body:
            await asyncio.sleep(0)
        client.left.set()
        await sending
        assert (stream.closed, stream.over) == (True, [False])

    run(work)


def test_a_client_that_reads_nothing_ends_the_stream():
    async def work() -> None:
        client, stream = Client(), Stream([A, B], waits=True)
        client.takes = 2
        await stream.send_to(client, send_timeout_s=0.01)
        assert len(client.got) == 2
        assert stream.over == [False]

    run(work)


def test_a_silent_stream_is_kept_alive():
    async def work() -> None:
        async def silent() -> AsyncGenerator[StreamEvent]:
            for seconds in (0.05, 40, 1):
                await asyncio.sleep(seconds)
                yield A

        wait = SIGN_OF_LIFE
        assert [one async for one in kept_alive(silent(), 0.1)] == [wait, A, wait, wait, A, A]
        stream = Stream([A], waits=True)
        kept = kept_alive(stream.events(), 0.1)
        await begun(kept)
        assert [await anext(kept), await anext(kept)] == [A, wait]
        await kept.aclose()
        assert stream.closed

    virtual_time.run(work)


def test_a_stream_begins_before_its_first_event():
    """But not before an error that can still set its status."""

    async def work() -> None:
        async def slow() -> AsyncGenerator[StreamEvent]:
            await asyncio.sleep(5)
            yield A

        kept = kept_alive(slow(), 0.1)
        await begun(kept)
        assert asyncio.get_running_loop().time() == pytest.approx(0.1)
        assert [one async for one in kept] == [SIGN_OF_LIFE, A]
        with pytest.raises(BadRequest):
            await begun(kept_alive(Stream([BadRequest("no")]).events(), 0.1))
        stream = Stream([A], waits=True)
        kept = kept_alive(stream.events(), 0.1)
        await begun(kept)
        await kept.aclose()  # the client has gone before anything was sent
        assert stream.closed

    virtual_time.run(work)


def test_events():
    assert DIALECT.event(A) == b'data: {"a":1}\n\n'
    assert DIALECT.event(StreamEvent({"a": "x\ny"}, "swarm")) == b'event: swarm\ndata: {"a":"x\\ny"}\n\n'
