"""The endpoints that generate text: from a request to its response, and the release of everything that it held."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access import authenticate, check_origin
from swarm.gateway.admission import NotAdmitted
from swarm.gateway.api_keys import ApiKey
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import RequestRoom, read_body
from swarm.gateway.http.responses import (
    Endpoint,
    JsonResponse,
    StreamResponse,
    begun,
    cancel_on_disconnect,
    kept_alive,
    with_error_responses,
)
from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.dialect import Dialect, StreamEvent
from swarm.gateway.openai.response_writers import ResponseWriter, complete_response, stream_response
from swarm.gateway.request_readers import Reader
from swarm.generation.sequence_group import SequenceGroup

STATUS_WAIT_S = 0.05
"""Seconds within which an error sets the status of a stream. Then it begins, and a later error is its last event."""

DETAILS_HEADER = "x-swarm-details"
"""Header of requests whose response also reports routes and recoveries."""


class GenerationEndpoints:
    """Answers requests that generate text."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    async def response(self, request: Request) -> Response:
        """`GET /v1/responses/ID` and `DELETE /v1/responses/ID`."""
        owner = _owner(await authenticate(self._gateway, request.headers), request)
        store, name = self._gateway.responses, request.path_params["id"]
        if request.method == "DELETE":
            check_origin(request.headers, self._gateway.settings.cors_origins, self._gateway.settings.host_names)
            store.delete(owner, name)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        return Response(store.get(owner, name).body, media_type=JsonResponse.media_type)

    def answering(self, read: Reader, dialect: type[Dialect] = Dialect) -> Endpoint:
        """The endpoint that answers one kind of request."""
        return with_error_responses(partial(self._generate, read=read, dialect=dialect), dialect)

    async def _generate(self, request: Request, read: Reader, dialect: type[Dialect]) -> Response:
        started_at = time.perf_counter()
        key = await authenticate(self._gateway, request.headers)
        owner = _owner(key, request)
        with self._count_rejections():
            self._gateway.admission.check_limits(key, 0)  # before anything is read or computed for the key
        async with AsyncExitStack() as until_response:
            held = AsyncExitStack()  # what the request holds until its response is complete
            until_response.push_async_callback(held.aclose)
            room = held.enter_context(self._gateway.request_room(key))
            asked = read(await self._read_body(request, room), owner)
            if (prepare := asked.prepare) is None:
                return JsonResponse(asked.known)
            if asked.provisional and DETAILS_HEADER not in request.headers:
                raise BadRequest(
                    f"early_exit.provisional needs the header {DETAILS_HEADER}, with which its events are sent",
                    param="early_exit.provisional",
                )
            served = self._gateway.model(asked.model)
            request.state.model = served.name

            async def start() -> RunningRequest:
                prepared = await self._gateway.run_in_thread(key, partial(prepare, served))
                room.hold(prepared.prompt_bytes)
                metrics = self._gateway.metrics
                group = SequenceGroup(served, prepared.sequences, asked.choices, started_at, metrics, owner)
                await self._start(held, key, prepared.reserved_tokens, group, room)
                return RunningRequest(group, prepared.writer, DETAILS_HEADER in request.headers)

            if not asked.stream:
                return JsonResponse(await cancel_on_disconnect(request.receive, _whole(start)))
            events = kept_alive(_streamed(start), STATUS_WAIT_S)
            await cancel_on_disconnect(request.receive, begun(events))
            held.enter_context(self._gateway.metrics.track_stream())
            until_response.pop_all()
            end = partial(self._end_stream, held)
            return StreamResponse(events, dialect(), self._gateway.settings.send_timeout_s, end)

    async def _start(
        self, held: AsyncExitStack, key: ApiKey | None, tokens: int, group: SequenceGroup, room: RequestRoom
    ) -> None:
        """Wait for admission, and begin to generate; both end when `held` is closed.

        Raises:
            NotAdmitted: a limit is used up, or the queue is full.
        """
        with self._count_rejections():
            ticket = await held.enter_async_context(self._gateway.admission.admit(key, tokens, group.parallel))
        room.release()  # from here on, the number of requests that run is the limit
        held.callback(lambda: ticket.report_usage(group.total_tokens))
        held.enter_context(self._gateway.abortable(group))
        await held.enter_async_context(group.generating())

    @contextmanager
    def _count_rejections(self) -> Iterator[None]:
        try:
            yield
        except NotAdmitted as error:
            self._gateway.metrics.request_refused(error.scope)
            raise

    async def _read_body(self, request: Request, room: RequestRoom) -> bytes:
        settings = self._gateway.settings
        check_origin(request.headers, settings.cors_origins, settings.host_names)
        return await read_body(request, settings.max_request_bytes, settings.read_timeout_s, room)

    async def _end_stream(self, held: AsyncExitStack, was_read: bool) -> None:
        if not was_read:
            self._gateway.metrics.client_disconnected()
        await held.aclose()


def _owner(key: ApiKey | None, request: Request) -> str:
    """Whose prefixes this request may begin with: those of its key or, without keys, of the machine it comes from.

    A request cannot say so itself: by the time of an answer, it could find out what others have asked.
    """
    if key is not None:
        return f"key {key.name}"
    return f"machine {request.client.host if request.client is not None else ''}"


@dataclass(frozen=True)
class RunningRequest:
    """A request whose sequences are being generated, and how its response is written."""

    group: SequenceGroup
    writer: ResponseWriter
    with_details: bool


async def _whole(start: Callable[[], Awaitable[RunningRequest]]) -> dict[str, Any]:
    running = await start()
    return await complete_response(running.group, running.writer, with_details=running.with_details)


async def _streamed(start: Callable[[], Awaitable[RunningRequest]]) -> AsyncGenerator[StreamEvent]:
    running = await start()
    async with aclosing(stream_response(running.group, running.writer, running.with_details)) as events:
        async for event in events:
            yield event
