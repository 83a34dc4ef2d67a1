"""The parts of HTTP that every address shares: bodies that are bounded, replies that end when nobody listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from swarm.gateway.failures import ApiFailure, TooLarge, TooSlow, Unavailable, failure_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

encode = msgspec.json.encode


class Gone(Exception):
    """The client has left; nobody reads a reply any more."""


class Json(Response):
    """A reply in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def failed(failure: ApiFailure) -> Json:
    """The reply that tells of a failure."""
    return Json(failure.body(), status_code=failure.status, headers=dict(failure.headers))


class Room:
    """Memory for the bodies that are being read, all together.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, count: int) -> None:
        """Raises `Unavailable` if there is not so much left."""
        if count > self._left:
            raise Unavailable(
                "the gateway reads too many large requests at once; try again in a moment",
                code="too_much_at_once",
                retry_after=1.0,
            )
        self._left -= count

    def give_back(self, count: int) -> None:
        self._left += count


async def read_body(request: Request, limit: int, seconds: float, room: Room) -> bytes:
    """The request's body.

    Args:
        limit: bytes that it may have.
        seconds: within which it has to come.
        room: for all bodies together.

    Raises:
        TooLarge, TooSlow: it is larger, or did not come in time.
        Unavailable: many others are being read.
        Gone: the client left before it was complete.
    """
    announced = request.headers.get("content-length", "0")
    # More digits than any limit has: not even looked at as a number.
    if len(announced) > 18 or (announced.isdigit() and int(announced) > limit):
        raise _too_large(limit)
    parts = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                room.take(len(part))
                parts += part
                if len(parts) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise TooSlow(f"the request did not come within {seconds:.0f} s") from None
    except ClientDisconnect:
        raise Gone from None
    finally:
        room.give_back(len(parts))
    return bytes(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request has more than {limit} bytes, which is the most that is read here", code="too_large")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; when the client leaves first, the work is cancelled. Raises `Gone`."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Not before both have ended: what the work holds has to be free by then.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, as they come from `events`.

    It ends early when the client leaves or takes nothing for `patience` seconds. What fails once the reply has begun is
    told as a last event, as OpenAI does.

    Args:
        events: encoded, see `event`; an asynchronous generator, which is closed at the end.
        patience: seconds.
        over: called in the end, whatever happened: whether the client has taken all of it.
    """

    def __init__(self, events: AsyncGenerator[bytes], patience: float, over: Callable[[bool], Awaitable[None]]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # a proxy in front should hand pieces on as they come
            }
        )
        self._events = events
        self._patience = patience
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        was_read = False
        try:
            await unless_gone(receive, self._send(send))
            was_read = True
        except Gone:
            logger.debug("a client left in the middle of its stream")
        except TimeoutError:
            # Not completed, so the server breaks the connection.
            logger.info("a client took nothing for %.0f s; its stream is given up", self._patience)
        finally:
            await self._over(was_read)

    async def _send(self, send: Send) -> None:
        await self._part(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async for body in events:
                    await self._part(send, {"type": "http.response.body", "body": body, "more_body": True})
            except ApiFailure as failure:
                body = event(failure.body())
                await self._part(send, {"type": "http.response.body", "body": body, "more_body": True})
        await self._part(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _part(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._patience):
            await send(message)


async def begun(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same events, once the first of them is there. Raises what failed before it."""
    first = await anext(events)

    async def all_of_them() -> AsyncGenerator[bytes]:
        async with aclosing(events):
            yield first
            async for one in events:
                yield one

    return all_of_them()


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event with JSON as its data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end."""

Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint; what it raises becomes a reply in OpenAI's form."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Gone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            failure = failure_of(error)
            if failure.status == 500:
                logger.exception("%s %s failed", request.method, request.url.path)
            return failed(failure)

    return call
