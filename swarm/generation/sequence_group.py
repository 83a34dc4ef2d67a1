"""The sequences of one request: starts them, follows them together, and ends them when the request ends.

A request of many sequences has only some of them generated at once; as one is complete, the next one starts. Those
with the same prompt wait until the first of them has computed it, and begin with a copy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.client.chain.prefix import Prefix
from swarm.client.routes.events import BlocksMissing, HopLost, Recovered, RouteTaken
from swarm.errors import SwarmError, format_blocks
from swarm.generation.early_exits import exit_details
from swarm.generation.errors import GenerationCrashed
from swarm.generation.sequence_generation import (
    PromptProgress,
    RoomAwaited,
    SequenceEnd,
    SequenceEvent,
    SequenceFailed,
    SequenceGeneration,
    SequenceProvisional,
)
from swarm.generation.sequence_output import SequenceDelta
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel

if TYPE_CHECKING:
    from swarm.metrics.gateway import GatewayMetrics

logger = logging.getLogger(__name__)


MAX_PARALLEL = 8
"""Sequences of a request that are generated at once. Each is a session on every server."""

MIN_SHARED_TOKENS = 64
"""A shorter prompt is computed for each sequence, which takes less time than to wait for the first one."""


@dataclass(frozen=True)
class Usage:
    """What a request has taken so far.

    Attributes:
        new_tokens: those that were generated.
        cached_tokens: of the prompts, computed for earlier requests.
        thought_tokens: those of the new ones that belong to thoughts.
        seconds: since the request came.
        first_token_seconds: of these, until its first token; None before that.
    """

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    thought_tokens: int
    seconds: float
    first_token_seconds: float | None


class SequenceGroup:
    """All sequences of one request while they are generated.

    Args:
        served: the model.
        requests: one for each sequence.
        choices: sequences for each prompt; the tokens of a prompt are counted once.
        started_at: `time.perf_counter()` when the request came.
        metrics: None if nothing is measured.
        owner: whose request it is: only that of the same owner begins with what this one leaves.
    """

    def __init__(
        self,
        served: ServedModel,
        requests: Sequence[SequenceRequest],
        choices: int,
        started_at: float,
        metrics: GatewayMetrics | None = None,
        owner: str = "",
    ) -> None:
        self.prompt_tokens = sum(len(request.prompt) for request in requests) // choices
        self._early_exits = [request.early_exit for request in requests if request.early_exit is not None]
        self._served = served
        self._metrics = metrics
        self._started_at = self._last_token_at = started_at
        self._first_token_at: float | None = None
        self._tokens = 0  # generated until the newest output came
        self._waiting: deque[SequenceGeneration] = deque()
        self._started: list[SequenceGeneration] = []
        self._ended = 0
        self._owner = owner
        self._events: asyncio.Queue[tuple[int, SequenceEvent]] = asyncio.Queue()
        self._followers = _followers(requests)
        self._generations = [self._generation(index, request) for index, request in enumerate(requests)]

    def _generation(self, index: int, request: SequenceRequest) -> SequenceGeneration:
        def on_event(event: SequenceEvent) -> None:
            self._events.put_nowait((index, event))
            if isinstance(event, SequenceEnd):
                self._ended += 1
                on_prompt(None)

        def on_prompt(prefix: Prefix | None) -> None:
            for follower in self._followers.pop(index, ()):
                self._generations[follower].prompt = prefix
                self._waiting.append(self._generations[follower])
            self._start_after(index)

        shares = on_prompt if index in self._followers else None
        return SequenceGeneration(self._served, request, on_event, self._owner, shares)

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def parallel(self) -> int:
        """How many sequences are generated at once."""
        return min(len(self), MAX_PARALLEL)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were computed for earlier requests."""
        firsts = {id(one.request.prompt): one for one in reversed(self._generations)}
        return sum(generation.cached_tokens for generation in firsts.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(generation.tokens for generation in self._generations)

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompts, and generated so far."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def usage(self) -> Usage:
        """What the request has taken so far."""
        thought_tokens = sum(generation.thought_tokens for generation in self._generations)
        started, first = self._started_at, self._first_token_at
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            thought_tokens,
            time.perf_counter() - started,
            first - started if first is not None else None,
        )

    def summary(self) -> dict[str, Any]:
        """The detail of kind `done`, which clients show below an answer; see `docs/gateway.md`."""
        usage, tokens = self.usage, self._tokens
        first = usage.first_token_seconds
        since_first = usage.seconds - first if first is not None else 0.0
        summary: dict[str, Any] = {
            "kind": "done",
            "tokens": tokens,
            "seconds": round(usage.seconds, 3),
            "tokens_per_second": round((tokens - 1) / since_first, 2) if since_first and tokens > 1 else None,
            "first_token_seconds": round(first, 3) if first is not None else None,
        }
        if self._early_exits:
            exits = exit_details(generation.exits for generation in self._generations)
            approximate = not all(options.verify for options in self._early_exits)
            summary["early_exit"] = {"approximate": approximate, "exits": exits}
        if self.cached_tokens:
            summary["cached_tokens"] = self.cached_tokens
        guesses = sum((generation.guesses for generation in self._generations), Counter[tuple[str, bool]]())
        if guesses:
            summary["guesses"] = [
                {"draft": draft, "stood": guesses[draft, True], "wrong": guesses[draft, False]}
                for draft in sorted({draft for draft, _ in guesses})
            ]
        return summary

    def abort(self, error: SwarmError) -> None:
        """End the request with this error, now."""
        self._events.put_nowait((0, SequenceFailed(error)))

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Generate the sequences inside of the context; those that are not complete at its end are cancelled."""
        following = {index for indices in self._followers.values() for index in indices}
        self._waiting.extend(one for index, one in enumerate(self._generations) if index not in following)
        try:
            self._start_waiting()
            yield
        finally:
            self._waiting.clear()
            self._followers.clear()
            for generation in self._started:
                generation.cancel()
            # The place in the gateway's queue is given up only after the servers' caches are free again.
            await asyncio.shield(asyncio.gather(*(generation.wait_ended() for generation in self._started)))
            if self._metrics is not None:
                used = self.prompt_tokens, self.completion_tokens, self.cached_tokens
                self._metrics.tokens_used(self._served.name, *used)

    def _start_waiting(self) -> None:
        """Start as many as may run at once."""
        while self._waiting and len(self._started) - self._ended < self.parallel:
            generation = self._waiting.popleft()
            generation.start()  # fails where the process may have no more threads
            self._started.append(generation)

    def _start_after(self, index: int) -> None:
        """A sequence is complete or has computed its prompt, so that others may start."""
        try:
            self._start_waiting()
        except RuntimeError:
            logger.exception("The next sequence of a request cannot be started")
            crash = GenerationCrashed("the generation failed; the log has the details")
            self._events.put_nowait((index, SequenceFailed(crash)))

    async def events(self) -> AsyncGenerator[tuple[int, SequenceEvent]]:
        """Events of all sequences as (index, event), until all are complete. Consecutive deltas are merged.

        Raises:
            SwarmError: a sequence failed, or the request was aborted.
        """
        unfinished = len(self._generations)
        while unfinished:
            waiting = [await self._events.get()]
            while not self._events.empty():
                waiting.append(self._events.get_nowait())
            for index, event in merge_deltas(waiting):
                if isinstance(event, SequenceFailed):
                    raise event.error
                unfinished -= isinstance(event, SequenceEnd)
                if isinstance(event, SequenceDelta):
                    self._measure_delta()
                yield index, event

    def _measure_delta(self) -> None:
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
            if self._metrics is not None:
                self._metrics.first_token(self._served.name, now - self._started_at)
        elif self._metrics is not None:
            self._metrics.next_token(self._served.name, now - self._last_token_at)
        self._last_token_at = now
        self._tokens = self.completion_tokens


def _followers(requests: Sequence[SequenceRequest]) -> dict[int, list[int]]:
    """Which sequences begin with a copy of another one's prompt, by that one."""
    first: dict[int, int] = {}
    followers: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        leader = first.setdefault(id(request.prompt), index)
        is_shared = len(request.prompt) >= MIN_SHARED_TOKENS and request.limit and not request.scores_prompt
        if leader != index and is_shared and request.images is None:
            followers.setdefault(leader, []).append(index)
    return followers


def merge_deltas(waiting: Sequence[tuple[int, SequenceEvent]]) -> list[tuple[int, SequenceEvent]]:
    """Join consecutive deltas of the same sequence, so that a slow reader gets fewer and longer ones.

    Provisional texts that a later event of their sequence replaces are left out, and do not come between deltas.
    """
    merged: list[tuple[int, SequenceEvent]] = []
    for index, event in _without_replaced(waiting):
        if merged and isinstance(event, SequenceDelta):
            last_index, last = merged[-1]
            if last_index == index and isinstance(last, SequenceDelta):
                merged[-1] = (index, last + event)
                continue
        merged.append((index, event))
    return merged


def _without_replaced(waiting: Sequence[tuple[int, SequenceEvent]]) -> list[tuple[int, SequenceEvent]]:
    """The events without provisional texts behind which their sequence has other output, or its end."""
    kept: list[tuple[int, SequenceEvent]] = []
    replaced: set[int] = set()
    for index, event in reversed(waiting):
        if isinstance(event, SequenceProvisional) and index in replaced:
            continue
        if isinstance(event, SequenceDelta | SequenceProvisional | SequenceEnd | SequenceFailed):
            replaced.add(index)
        kept.append((index, event))
    return kept[::-1]


def route_detail(event: SequenceEvent) -> dict[str, Any] | None:
    """The detail that describes an event; None if clients are not told of it."""
    match event:
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
        case RoomAwaited():
            return {"kind": "waiting"}
        case PromptProgress(computed, tokens):
            return {"kind": "prompt", "computed": computed, "tokens": tokens}
    return None
