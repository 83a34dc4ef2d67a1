"""Responses in JSON, streams, and the end of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from swarm.gateway.openai.api_errors import ApiError, InternalServerError, api_error
from swarm.gateway.openai.dialect import Dialect, StreamEvent

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection, so no response is sent any more."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first.

    What has to be given back does not belong in the result: if the caller is cancelled at that moment, it is lost.

    Raises:
        ClientDisconnected: the client disconnected before the work was done.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Wait until both have ended, so that the resources of the work are free.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status in the log for a client that disconnected; nginx introduced it."""

Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """A response in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError, dialect: type[Dialect] = Dialect) -> JsonResponse:
    """The response that reports an error."""
    return JsonResponse(dialect.error_body(error), status_code=error.status, headers=dict(error.headers))


def with_error_responses(endpoint: Endpoint, dialect: type[Dialect] = Dialect) -> Endpoint:
    """The endpoint, with its exceptions turned into responses."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # a bug, too, has to be answered in the client's form
            reported = api_error(error)
            if isinstance(reported, InternalServerError):
                logger.exception("%s %s failed", request.method, request.scope["path"])
            return error_response(reported, dialect)

    return call


KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream gets a sign of life, so that no proxy on the way takes it for dead."""

SIGN_OF_LIFE = None
"""In the place of an event: something that clients ignore."""

Events = AsyncGenerator[StreamEvent | None]


class StreamResponse(Response):
    """A stream of events.

    It ends early when the client disconnects, or takes nothing for `send_timeout_s`. An error in the middle of the
    stream is sent as the last event, as OpenAI does.

    Args:
        events: an asynchronous generator, which is closed at the end.
        dialect: writes them.
        send_timeout_s: within which the client has to take the next part.
        on_end: called at the end in any case, with whether the client has taken everything.
    """

    def __init__(
        self, events: Events, dialect: Dialect, send_timeout_s: float, on_end: Callable[[bool], Awaitable[None]]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "Content-Type": dialect.media_type,
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",  # asks reverse proxies to pass each part on at once
            }
        )
        self._events = events
        self._dialect = dialect
        self._send_timeout_s = send_timeout_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        was_read = False
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
            was_read = True
        except ClientDisconnected:
            logger.debug("a client disconnected in the middle of its stream")
        except TimeoutError:
            # The response stays incomplete, so the server closes the connection.
            logger.info("A client took nothing for %.0f s; its stream is closed", self._send_timeout_s)
        finally:
            await self._on_end(was_read)

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            await self._send(send, start)
            async for body in self._encoded(events):
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)

    async def _encoded(self, events: Events) -> AsyncGenerator[bytes]:
        """The events. An error, too, becomes one, the last."""
        dialect = self._dialect
        try:
            async for event in events:
                yield dialect.keep_alive if event is SIGN_OF_LIFE else dialect.event(event)
            yield dialect.end
        except Exception as error:  # a bug, too, has to be told in the client's form
            reported = api_error(error)
            if isinstance(reported, InternalServerError):
                logger.exception("A stream failed")
            yield dialect.error(reported)


async def kept_alive(events: AsyncGenerator[StreamEvent], wait_s: float) -> Events:
    """The same events, and signs of life while none comes.

    One more comes first (see `begun`): once the first event is there, or after `wait_s` seconds. An error until then is
    raised instead.
    """
    following = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait({following}, timeout=wait_s)
        if following.done():
            following.result()
        yield SIGN_OF_LIFE
        if not following.done():
            yield SIGN_OF_LIFE  # so that proxies pass the head of the response on
        while True:
            await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
            if not following.done():
                yield SIGN_OF_LIFE
                continue
            if (event := following.result()) is None:
                return
            yield event
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


async def begun(events: Events) -> None:
    """Returns when the events of `kept_alive` can be sent."""
    await anext(events)
