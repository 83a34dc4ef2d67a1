"""The addresses at which something is generated: from a request to its reply, and what is free again at its end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.answering import Answering, Chunk
from swarm.gateway.entrance import authorized, check_origin
from swarm.gateway.generation import Work
from swarm.gateway.http import DONE, EventStream, Json, begun, event, read_body, unless_gone
from swarm.gateway.keys import Key
from swarm.gateway.limits import Refused, Ticket
from swarm.gateway.prompts import chat_works, completion_works, echoed
from swarm.gateway.replies import ChatReplies, Replies, TextReplies
from swarm.gateway.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from swarm.gateway.service import ServedModel, Service

DETAILS = "x-swarm-details"
"""Header of those who want to hear of routes and recoveries."""


@dataclass(frozen=True)
class Made:
    """What a request comes to: its sequences, and who writes the reply."""

    works: list[Work]
    replies: Replies


Asked = TypeVar("Asked", ChatRequest, CompletionRequest)


class Generating:
    """Answers requests that generate.

    Args:
        service: what all requests share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, read_chat, self._chat)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, read_completion, self._completion)

    def _chat(self, asked: ChatRequest, served: ServedModel) -> Made:
        works = chat_works(asked, served, self._service.settings.default_tokens)
        return Made(works, ChatReplies(served.name, served.tokenizer, tells_usage=asked.include_usage))

    def _completion(self, asked: CompletionRequest, served: ServedModel) -> Made:
        works = completion_works(asked, served)
        prompts = echoed(works, served) if asked.echo else []
        return Made(works, TextReplies(served.name, served.tokenizer, prompts, tells_usage=asked.include_usage))

    async def _generate(
        self, request: Request, read: Callable[[bytes], Asked], make: Callable[[Asked, ServedModel], Made]
    ) -> Response:
        began = time.perf_counter()
        key = await authorized(self._service, request.headers)
        self._check(key)
        asked = read(await self._body(request))
        served = self._service.model(asked.model)
        request.state.model = served.name
        made = await self._service.prepare(request.receive, key, partial(make, asked, served))
        return await self._answer(request, key, asked, served, made, began)

    async def _answer(
        self,
        request: Request,
        key: Key | None,
        asked: ChatRequest | CompletionRequest,
        served: ServedModel,
        made: Made,
        began: float,
    ) -> Response:
        works = made.works
        reserved = sum(len(work.prompt) + work.max_tokens for work in works)
        answering = Answering(served, works, made.replies, asked.n or 1, began, self._service.metrics)
        tells = DETAILS in request.headers
        async with AsyncExitStack() as stack:
            ticket = await unless_gone(request.receive, self._let_in(stack, key, reserved, len(works)))
            stack.callback(lambda: ticket.used(answering.usage["total_tokens"]))
            stack.enter_context(self._service.open(answering))
            await stack.enter_async_context(answering.running())
            if not asked.stream:
                body = await unless_gone(request.receive, answering.whole())
                return Json({**body, "swarm": answering.progress.details} if tells else body)
            events = _events(answering, asked.include_usage, tells)
            if not tells:
                # What fails before the first token gets its own status; who wants to hear of waiting hears at once.
                events = await unless_gone(request.receive, begun(events))
            stack.enter_context(self._service.metrics.stream())
            over = partial(self._over, stack.pop_all())
            return EventStream(events, self._service.settings.send_seconds, over)

    def _check(self, key: Key | None) -> None:
        """Raises `Refused` before anything is read and computed for a key that has nothing left."""
        with self._counted():
            self._service.admission.check(key, 0)

    async def _let_in(self, stack: AsyncExitStack, key: Key | None, tokens: int, texts: int) -> Ticket:
        """Wait for a place, which is free again when the stack is closed. Raises `Refused`."""
        with self._counted():
            return await stack.enter_async_context(self._service.admission.enter(key, tokens, texts))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            self._service.metrics.refused(error.scope)
            raise

    async def _body(self, request: Request) -> bytes:
        settings = self._service.settings
        check_origin(request.headers, settings.origins)
        body = await read_body(request, settings.request_bytes, settings.read_seconds, self._service.room)
        self._service.metrics.received(len(body))
        return body

    async def _over(self, stack: AsyncExitStack, was_read: bool) -> None:
        """A stream has come to its end."""
        if not was_read:
            self._service.metrics.disconnected()
        await stack.aclose()


async def _events(answering: Answering, include_usage: bool, tells: bool) -> AsyncGenerator[bytes]:
    """The encoded events of a stream."""
    async with aclosing(answering.stream(include_usage)) as parts:
        async for part in parts:
            if isinstance(part, Chunk):
                yield event(part.body)
            elif tells:
                yield event(part.body, "swarm")
    yield DONE
