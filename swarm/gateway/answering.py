"""From a request's sequences to its reply: starts them, follows them, ends them when nobody listens any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from swarm.client.routes.events import BlocksMissing, HopLost, Recovered, RouteTaken
from swarm.errors import format_blocks
from swarm.gateway.failures import ApiFailure
from swarm.gateway.generation import Delta, End, Failed, Generation, News, Work
from swarm.gateway.replies import Answer, Replies, usage
from swarm.gateway.service import ServedModel
from swarm.metrics.gateway import GatewayMetrics


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed reply, in OpenAI's form."""

    body: dict[str, Any]


@dataclass(frozen=True)
class Detail:
    """What is told on the way to those who asked for it: see `docs/gateway.md`."""

    body: dict[str, Any]


@dataclass
class Progress:
    """How far a request has come.

    Attributes:
        began: `time.perf_counter()` when the request came.
        first: when the first token came.
        details: told so far.
    """

    began: float
    first: float | None = None
    tokens: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)

    def done(self) -> dict[str, Any]:
        """What the page writes below an answer."""
        now = time.perf_counter()
        since_first = now - self.first if self.first is not None else 0.0
        return {
            "kind": "done",
            "tokens": self.tokens,
            "seconds": round(now - self.began, 3),
            "tokens_per_second": round((self.tokens - 1) / since_first, 2) if since_first and self.tokens > 1 else None,
            "first_token_seconds": round(self.first - self.began, 3) if self.first is not None else None,
        }


class Answering:
    """The sequences of one request under way.

    Args:
        served: the model.
        works: one sequence each.
        replies: writes the reply.
        choices: sequences of each prompt; a prompt counts once.
        began: `time.perf_counter()` when the request came.
        metrics: of the gateway.
    """

    def __init__(
        self,
        served: ServedModel,
        works: Sequence[Work],
        replies: Replies,
        choices: int,
        began: float,
        metrics: GatewayMetrics,
    ) -> None:
        self.progress = Progress(began)
        self.answers = [Answer() for _ in works]
        self._served = served
        self._replies = replies
        self._metrics = metrics
        self._prompt = sum(len(work.prompt) for work in works) // choices
        self._last = began
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._generations = [self._generation(index, work) for index, work in enumerate(works)]

    def _generation(self, index: int, work: Work) -> Generation:
        def hear(news: News) -> None:
            self._news.put_nowait((index, news))

        served = self._served
        return Generation(served.model, served.tokenizer, served.baton, served.ends, work, hear)

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(generation.tokens for generation in self._generations)

    @property
    def usage(self) -> dict[str, int]:
        return usage(self._prompt, self.tokens)

    def hang_up(self, failure: ApiFailure) -> None:
        """End the reply with this failure, now."""
        self._news.put_nowait((0, Failed(failure)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the sequences are generated; whatever is left of them is ended at the end."""
        started: list[Generation] = []
        try:
            for generation in self._generations:
                generation.start()  # fails where the process may have no more threads
                started.append(generation)
            yield
        finally:
            for generation in started:
                generation.cancel()
            # The turn to run is given up only once the swarm has room again.
            await asyncio.shield(asyncio.gather(*(generation.ended() for generation in started)))
            self._metrics.used(self._served.name, self._prompt, self.tokens)

    async def stream(self, include_usage: bool) -> AsyncGenerator[Chunk | Detail]:
        """The reply piece by piece. Raises `ApiFailure` when it cannot be completed."""
        started: set[int] = set()
        async for index, news in self._merged():
            if not isinstance(news, Delta | End):
                if (told := detail(news)) is not None:
                    yield Detail(told)
                continue
            # Not before there is something to tell: a reply that has begun can have no status of failure any more.
            if index not in started and (first := self._replies.first(index)) is not None:
                yield Chunk(first)
            started.add(index)
            if isinstance(news, Delta):
                yield Chunk(self._replies.chunk(index, news, self.answers[index]))
                self.answers[index].add(news)
            else:
                yield Chunk(self._replies.last(index, news.reason))
        if include_usage:
            yield Chunk(self._replies.used(self.usage))
        yield Detail(self.progress.done())

    async def whole(self) -> dict[str, Any]:
        """The reply at once. Raises `ApiFailure`."""
        async for index, news in self._merged():
            if isinstance(news, Delta):
                self.answers[index].add(news)
            elif isinstance(news, End):
                self.answers[index].reason = news.reason
            elif (told := detail(news)) is not None:
                self.progress.details.append(told)
        self.progress.details.append(self.progress.done())
        # In a thread, because the log probabilities of a long answer are a hundred thousand tokens to be decoded.
        return await asyncio.to_thread(self._replies.whole, self.answers, self.usage)

    async def _merged(self) -> AsyncIterator[tuple[int, News]]:
        """News of all sequences as they come, what waits together joined; until all have come to their end."""
        left = len(self._generations)
        while left:
            waiting = [await self._news.get()]
            while not self._news.empty():
                waiting.append(self._news.get_nowait())
            for index, news in joined(waiting):
                if isinstance(news, Failed):
                    raise news.failure
                left -= isinstance(news, End)
                self._measured(news)
                yield index, news

    def _measured(self, news: News) -> None:
        if not isinstance(news, Delta):
            return
        now = time.perf_counter()
        if self.progress.first is None:
            self.progress.first = now
            self._metrics.first_token(self._served.name, now - self.progress.began)
        else:
            self._metrics.next_token(self._served.name, now - self._last)
        self._last = now
        self.progress.tokens = self.tokens


def joined(waiting: Sequence[tuple[int, News]]) -> list[tuple[int, News]]:
    """Pieces of the same sequence that follow each other become one: a slow reader gets fewer and longer ones."""
    found: list[tuple[int, News]] = []
    for index, news in waiting:
        before = found[-1] if found else None
        if before is not None and before[0] == index and isinstance(before[1], Delta) and isinstance(news, Delta):
            one = before[1]
            found[-1] = (index, Delta(one.text + news.text, one.calls + news.calls, one.tokens + news.tokens))
        else:
            found.append((index, news))
    return found


def detail(news: News) -> dict[str, Any] | None:
    """An event of the session for those who look at the route; None if they need not know."""
    match news:
        case RouteTaken(route):
            hops = [
                {"blocks": str(hop.span), "peer": hop.server.short_id, "name": hop.server.name} for hop in route.hops
            ]
            return {"kind": "route", "hops": hops}
        case HopLost(peer_id, span, reason):
            return {"kind": "lost", "peer": "…" + peer_id[-6:], "blocks": str(span), "reason": reason}
        case BlocksMissing(blocks):
            return {"kind": "missing", "blocks": format_blocks(blocks)}
        case Recovered(seconds):
            return {"kind": "recovered", "seconds": round(seconds, 3)}
    return None
