"""The endpoints that generate text: from a request to its response, and the release of everything that it held."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access import authenticate, check_origin
from swarm.gateway.admission import AdmissionTicket, NotAdmitted
from swarm.gateway.api_keys import ApiKey
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import TOKEN_BYTES, RequestRoom, read_body
from swarm.gateway.http.responses import (
    DONE_EVENT,
    KEEP_ALIVE_COMMENT,
    EventStreamResponse,
    JsonResponse,
    await_first_event,
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
        writer = ChatResponseWriter(served.name, served.tokenizer, include_usage=parsed.include_usage)
        return PreparedRequest(sequences, writer)

    def _prepare_completion(self, parsed: CompletionRequest, served: ServedModel) -> PreparedRequest:
        sequences = completion_request_sequences(parsed, served, self._gateway.settings)
        echo = prompt_texts(sequences, served) if parsed.echo else []
        writer = CompletionResponseWriter(served.name, served.tokenizer, echo, include_usage=parsed.include_usage)
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
        with self._gateway.request_room(key) as room:
            parsed = parse(await self._read_body(request, room))
            prepared = await self._prepare(request, key, parsed, prepare)
            room.hold(prepared.prompt_bytes)
            group = SequenceGroup(
                self._gateway.model(parsed.model),
                prepared.sequences,
                parsed.n or 1,
                started_at,
                self._gateway.metrics,
                _owner(key, request),
            )
            return await self._respond(request, key, parsed, prepared, group, room)

    async def _prepare(
        self,
        request: Request,
        key: ApiKey | None,
        parsed: ParsedRequest,
        prepare: Callable[[ParsedRequest, ServedModel], PreparedRequest],
    ) -> PreparedRequest:
        if parsed.provisional and DETAILS_HEADER not in request.headers:
            raise BadRequest(
                f"early_exit.provisional needs the header {DETAILS_HEADER}, with which its events are sent",
                param="early_exit.provisional",
            )
        served = self._gateway.model(parsed.model)
        request.state.model = served.name
        return await self._gateway.run_in_thread(request.receive, key, partial(prepare, parsed, served))

    async def _respond(
        self,
        request: Request,
        key: ApiKey | None,
        parsed: ChatRequest | CompletionRequest,
        prepared: PreparedRequest,
        group: SequenceGroup,
        room: RequestRoom,
    ) -> Response:
        with_details = DETAILS_HEADER in request.headers
        async with AsyncExitStack() as stack:
            admission = self._admit(stack, key, prepared.reserved_tokens, group.parallel)
            ticket = await cancel_on_disconnect(request.receive, admission)
            room.release()  # from here on, the number of requests that run is the limit
            stack.callback(lambda: ticket.report_usage(group.total_tokens))
            stack.enter_context(self._gateway.abortable(group))
            await stack.enter_async_context(group.generating())
            if not parsed.stream:
                response = complete_response(group, prepared.writer, with_details=with_details)
                return JsonResponse(await cancel_on_disconnect(request.receive, response))
            events = encoded_events(group, prepared.writer, parsed.include_usage, with_details)
            if not with_details:
                # An error before anything is computed gets its own status. With details, the stream starts at once.
                events = await cancel_on_disconnect(request.receive, await_first_event(events))
            stack.enter_context(self._gateway.metrics.track_stream())
            on_end = partial(self._end_stream, stack.pop_all())
            return EventStreamResponse(kept_alive(events), self._gateway.settings.send_timeout_s, on_end)

    async def _admit(self, stack: AsyncExitStack, key: ApiKey | None, tokens: int, texts: int) -> AdmissionTicket:
        """Wait for admission, which ends when the stack is closed.

        Raises:
            NotAdmitted: a limit is used up, or the queue is full.
        """
        with self._count_rejections():
            return await stack.enter_async_context(self._gateway.admission.admit(key, tokens, texts))

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

    async def _end_stream(self, stack: AsyncExitStack, was_read: bool) -> None:
        if not was_read:
            self._gateway.metrics.client_disconnected()
        await stack.aclose()


def _owner(key: ApiKey | None, request: Request) -> str:
    """Whose prefixes this request may begin with: those of its key or, without keys, of the machine it comes from.

    A request cannot say so itself: by the time of an answer, it could find out what others have asked.
    """
    if key is not None:
        return f"key {key.name}"
    return f"machine {request.client.host if request.client is not None else ''}"


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
                yield KEEP_ALIVE_COMMENT  # a long prompt is on its way, so the stream begins
    yield DONE_EVENT
