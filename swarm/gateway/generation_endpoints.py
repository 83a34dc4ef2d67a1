"""The endpoints that generate text: from a request to its response, and the release of everything that it held."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access import authenticate, check_origin
from swarm.gateway.admission import NotAdmitted
from swarm.gateway.api_keys import ApiKey
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import TOKEN_BYTES, RequestRoom, read_body
from swarm.gateway.http.responses import (
    DONE_EVENT,
    KEEP_ALIVE_COMMENT,
    EventStreamResponse,
    JsonResponse,
    begun,
    cancel_on_disconnect,
    encode_event,
    kept_alive,
)
from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.request_conversion import chat_request_sequences, completion_request_sequences
from swarm.gateway.openai.request_schema import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from swarm.gateway.openai.response_writers import (
    ChatResponseWriter,
    CompletionResponseWriter,
    ResponseChunk,
    ResponseWriter,
    complete_response,
    stream_response,
)
from swarm.generation.prompts import prompt_texts
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel

STATUS_WAIT_S = 0.05
"""Seconds within which an error sets the status of a stream. Then it begins, and a later error is its last event."""

DETAILS_HEADER = "x-swarm-details"
"""Header of requests whose response also reports routes and recoveries."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready to be generated: its sequences, and the writer of its response."""

    sequences: list[SequenceRequest]
    writer: ResponseWriter

    @property
    def prompt_bytes(self) -> int:
        """What all different prompts and their images take in memory; the answers to one share it."""
        different = {id(sequence.prompt): sequence for sequence in self.sequences}.values()
        return sum(len(one.prompt) * TOKEN_BYTES + (one.images.bytes if one.images else 0) for one in different)

    @property
    def reserved_tokens(self) -> int:
        """The most tokens that prompts and answers may have together."""
        return sum(len(sequence.prompt) + sequence.limit for sequence in self.sequences)


ParsedRequest = TypeVar("ParsedRequest", ChatRequest, CompletionRequest)


class GenerationEndpoints:
    """Answers requests that generate text.

    Args:
        gateway: the state that all requests share.
    """

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, parse_chat_request, self._prepare_chat)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, parse_completion_request, self._prepare_completion)

    def _prepare_chat(self, parsed: ChatRequest, served: ServedModel) -> PreparedRequest:
        sequences = chat_request_sequences(parsed, served, self._gateway.settings)
        writer = ChatResponseWriter(
            served.name, served.tokenizer, include_usage=parsed.include_usage, fingerprint=served.fingerprint
        )
        return PreparedRequest(sequences, writer)

    def _prepare_completion(self, parsed: CompletionRequest, served: ServedModel) -> PreparedRequest:
        sequences = completion_request_sequences(parsed, served, self._gateway.settings)
        echo = prompt_texts(sequences, served) if parsed.echo else []
        writer = CompletionResponseWriter(
            served.name, served.tokenizer, echo, include_usage=parsed.include_usage, fingerprint=served.fingerprint
        )
        return PreparedRequest(sequences, writer)

    async def _generate(
        self,
        request: Request,
        parse: Callable[[bytes], ParsedRequest],
        prepare: Callable[[ParsedRequest, ServedModel], PreparedRequest],
    ) -> Response:
        started_at = time.perf_counter()
        key = await authenticate(self._gateway, request.headers)
        with self._count_rejections():
            self._gateway.admission.check_limits(key, 0)  # before anything is read or computed for the key
        async with AsyncExitStack() as until_response:
            held = AsyncExitStack()  # what the request holds until its response is complete
            until_response.push_async_callback(held.aclose)
            room = held.enter_context(self._gateway.request_room(key))
            parsed = parse(await self._read_body(request, room))
            if parsed.provisional and DETAILS_HEADER not in request.headers:
                raise BadRequest(
                    f"early_exit.provisional needs the header {DETAILS_HEADER}, with which its events are sent",
                    param="early_exit.provisional",
                )
            served = self._gateway.model(parsed.model)
            request.state.model = served.name

            async def start() -> RunningRequest:
                work = partial(prepare, parsed, served)
                prepared = await self._gateway.run_in_thread(request.receive, key, work)
                room.hold(prepared.prompt_bytes)
                choices, metrics = parsed.n or 1, self._gateway.metrics
                group = SequenceGroup(served, prepared.sequences, choices, started_at, metrics, _owner(key, request))
                await self._start(held, key, prepared.reserved_tokens, group, room)
                return RunningRequest(group, prepared.writer, parsed.include_usage, DETAILS_HEADER in request.headers)

            if not parsed.stream:
                return JsonResponse(await cancel_on_disconnect(request.receive, _whole(start)))
            events = kept_alive(_streamed(start), STATUS_WAIT_S)
            await cancel_on_disconnect(request.receive, begun(events))
            held.enter_context(self._gateway.metrics.track_stream())
            until_response.pop_all()
            return EventStreamResponse(events, self._gateway.settings.send_timeout_s, partial(self._end_stream, held))

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
    include_usage: bool
    with_details: bool


async def _whole(start: Callable[[], Awaitable[RunningRequest]]) -> dict[str, Any]:
    running = await start()
    return await complete_response(running.group, running.writer, with_details=running.with_details)


async def _streamed(start: Callable[[], Awaitable[RunningRequest]]) -> AsyncGenerator[bytes]:
    running = await start()
    events = encoded_events(running.group, running.writer, running.include_usage, running.with_details)
    async with aclosing(events):
        async for event in events:
            yield event


async def encoded_events(
    group: SequenceGroup, writer: ResponseWriter, include_usage: bool, with_details: bool
) -> AsyncGenerator[bytes]:
    """The events of a streamed response."""
    async with aclosing(stream_response(group, writer, include_usage)) as parts:
        async for part in parts:
            if isinstance(part, ResponseChunk):
                yield encode_event(part.body)
            elif with_details:
                yield encode_event(part.body, "swarm")
            elif part.body["kind"] == "prompt":
                yield KEEP_ALIVE_COMMENT  # a long prompt is on its way
    yield DONE_EVENT
