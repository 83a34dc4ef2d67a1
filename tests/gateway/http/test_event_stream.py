"""Bodies, streams and clients that leave, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.requests import Request

from swarm.gateway.http.disconnect import ClientDisconnected, cancel_on_disconnect
from swarm.gateway.http.event_stream import EventStreamResponse, await_first_event, encode_event
from swarm.gateway.http.request_body import BodyMemory, read_body
from swarm.gateway.openai.api_errors import BadRequest, PayloadTooLarge, RequestTimeout, ServiceUnavailable


class Client:
    """The other side of one request: what it sends, and what it has got."""

    def __init__(
        self, parts: Iterable[bytes] = (), leaves: bool = False, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._parts = list(parts)
        self._leaves = leaves
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
        }
        self.left = asyncio.Event()
        self.got: list[dict[str, Any]] = []
        self.takes = 1000

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            body = self._parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts) or self._leaves}
        if not self._leaves:
            await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.got) == self.takes:
            await asyncio.Event().wait()
        self.got.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)

    async def read(self, limit: int = 10, seconds: float = 5.0, room: BodyMemory | None = None) -> bytes:
        return await read_body(Request(self.scope, self.receive), limit, seconds, room or BodyMemory(100))


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_a_body_is_read():
    async def work() -> None:
        assert await Client([b"ab", b"cd"]).read() == b"abcd"

    run(work)


@pytest.mark.parametrize("headers", [[], [("content-length", "11")], [("content-length", "9" * 400)]])
def test_a_body_that_is_too_large(headers):
    async def work() -> None:
        with pytest.raises(PayloadTooLarge, match="larger than 10 bytes"):
            await Client([b"123456", b"78901"], headers=headers).read()

    run(work)


def test_a_body_that_does_not_come():
    async def work() -> None:
        with pytest.raises(RequestTimeout, match="did not arrive within 0 s"):
            await Client().read(seconds=0.01)

    run(work)


def test_a_client_that_leaves_before_its_body_is_whole():
    async def work() -> None:
        with pytest.raises(ClientDisconnected):
            await Client([b"a"], leaves=True).read()

    run(work)


def test_bodies_have_so_much_room_together():
    async def work() -> None:
        room = BodyMemory(10)
        first = asyncio.create_task(Client([b"1234567"], leaves=True).read(room=room))
        with pytest.raises(ClientDisconnected):
            await first
        for _ in range(3):  # whatever became of a body, its room is free again
            assert await Client([b"12345", b"67890"]).read(room=room) == b"1234567890"
            with pytest.raises(ServiceUnavailable, match="too many large requests at once"):
                await Client([b"123456", b"78901"]).read(limit=20, room=room)

    run(work)


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


class Stream:
    """A stream of events, and how it ended."""

    def __init__(self, events: Iterable[bytes | Exception], waits: bool = False) -> None:
        self.closed = False
        self.over: list[bool] = []
        self._events = list(events)
        self._waits = waits

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            for one in self._events:
                if isinstance(one, Exception):
                    raise one
                yield one
            if self._waits:
                await asyncio.Event().wait()
        finally:
            self.closed = True

    async def send_to(self, client: Client, patience: float = 5.0) -> None:
        async def over(was_read: bool) -> None:
            assert self.closed
            self.over.append(was_read)

        await EventStreamResponse(self.events(), patience, over)(client.scope, client.receive, client.send)


def test_a_stream_is_sent_as_it_comes():
    async def work() -> None:
        client, stream = Client(), Stream([b"a", b"b"])
        await stream.send_to(client)
        assert [message.get("body") for message in client.got] == [None, b"a", b"b", b""]
        assert [message.get("more_body") for message in client.got] == [None, True, True, False]
        assert stream.over == [True]

    run(work)


def test_what_fails_in_the_middle_is_an_event():
    async def work() -> None:
        client, stream = Client(), Stream([b"a", ServiceUnavailable("gone", code="x")])
        await stream.send_to(client)
        failure = {"message": "gone", "type": "server_error", "param": None, "code": "x"}
        assert client.body == b"a" + encode_event({"error": failure})
        assert stream.over == [True]

    run(work)


def test_a_reader_that_leaves_ends_the_stream():
    async def work() -> None:
        client, stream = Client(), Stream([b"a"], waits=True)
        sending = asyncio.ensure_future(stream.send_to(client))
        while not client.body:
            await asyncio.sleep(0)
        client.left.set()
        await sending
        assert (stream.closed, stream.over) == (True, [False])

    run(work)


def test_a_reader_that_takes_nothing_ends_the_stream():
    async def work() -> None:
        client, stream = Client(), Stream([b"a", b"b"], waits=True)
        client.takes = 2
        await stream.send_to(client, patience=0.01)
        assert len(client.got) == 2
        assert stream.over == [False]

    run(work)


def test_a_stream_that_has_begun_is_the_same_stream():
    async def work() -> None:
        stream = Stream([b"a", b"b"])
        assert [one async for one in await await_first_event(stream.events())] == [b"a", b"b"]
        with pytest.raises(BadRequest):
            await await_first_event(Stream([BadRequest("no")]).events())

    run(work)


def test_events():
    assert encode_event({"a": 1}) == b'data: {"a":1}\n\n'
    assert encode_event({"a": "x\ny"}, "swarm") == b'event: swarm\ndata: {"a":"x\\ny"}\n\n'
