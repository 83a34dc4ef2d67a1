"""Responses in JSON, streams of events, and the end of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from swarm.errors import SwarmError
from swarm.gateway.openai.api_errors import ApiError, InternalServerError, api_error

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection, so no response is sent any more."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first.

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


def error_response(error: ApiError) -> JsonResponse:
    """The response that reports an error."""
    return JsonResponse(error.body(), status_code=error.status, headers=dict(error.headers))


def with_error_responses(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with its exceptions turned into responses in OpenAI's form."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # a bug, too, has to be answered in OpenAI's form
            reported = api_error(error)
            if isinstance(reported, InternalServerError):
                logger.exception("%s %s failed", request.method, request.scope["path"])
            return error_response(reported)

    return call


DONE_EVENT = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""

KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream gets a comment, so that no proxy on the way takes it for dead."""

KEEP_ALIVE_COMMENT = b": waiting\n\n"
"""What clients of server-sent events ignore."""


class EventStreamResponse(Response):
    """A stream of server-sent events.

    It ends early when the client disconnects, or takes nothing for `send_timeout_s`. An error in the middle of the
    stream is sent as the last event, as OpenAI does.

    Args:
        events: encoded, see `encode_event`; an asynchronous generator, which is closed at the end.
        send_timeout_s: within which the client has to take the next part.
        on_end: called at the end in any case, with whether the client has taken everything.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], send_timeout_s: float, on_end: Callable[[bool], Awaitable[None]]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",  # asks reverse proxies to pass each part on at once
            }
        )
        self._events = events
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
            async for body in _with_error_event(events):
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)


async def _with_error_event(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same events. An error, too, becomes one, the last."""
    try:
        async for event in events:
            yield event
    except SwarmError as error:
        yield encode_event(api_error(error).body())
    except ClientDisconnected:
        raise
    except Exception as error:  # a bug, too, has to be told in OpenAI's form
        logger.exception("A stream failed")
        yield encode_event(api_error(error).body())


async def kept_alive(events: AsyncGenerator[bytes], wait_s: float) -> AsyncGenerator[bytes]:
    """The same events, and comments while none comes.

    An empty one comes first (see `begun`): once the first event is there, or after `wait_s` seconds. An error until
    then is raised instead.
    """
    following = asyncio.ensure_future(anext(events, b""))
    try:
        await asyncio.wait({following}, timeout=wait_s)
        if following.done():
            following.result()
        yield b""
        if not following.done():
            yield KEEP_ALIVE_COMMENT  # so that proxies pass the head of the response on
        while True:
            await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
            if not following.done():
                yield KEEP_ALIVE_COMMENT
                continue
            if not (event := following.result()):
                return
            yield event
            following = asyncio.ensure_future(anext(events, b""))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


async def begun(events: AsyncGenerator[bytes]) -> None:
    """Returns when the events of `kept_alive` can be sent."""
    await anext(events)


def encode_event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event with JSON as its data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
