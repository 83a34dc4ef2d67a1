"""The loop around the scheduler: collects requests, has the scheduler choose, and computes, iteration after iteration.

It runs in the compute thread. An error in one request never reaches another.

A request that waits alone is computed without asking the scheduler. Blocks that take a millisecond or two (small
models, few blocks) compute it in the network loop, because two changes of thread would cost as much.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swarm.common.outcome import result_or_error
from swarm.errors import ServerClosing
from swarm.metrics.server import ServerObserver
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.session_cache import StepComputation, advance_steps
from swarm.server.compute.batching_delay import BatchingDelay, CpuContentionMeter
from swarm.server.compute.compute_request import BackwardWork, ComputeResult, ForwardWork
from swarm.server.compute.compute_thread import ComputeThread, call_in_loop, settle_future
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, FairShares, QueuedTokens, next_batch
from swarm.server.throughput.throughput_meter import ThroughputMeter

MAX_ITERATION_S = 0.2
"""How long an iteration should take at most, because a decode step may have to wait for the chunk of a prompt."""

MAX_INLINE_ITERATION_S = 5e-3
"""A shorter iteration may be computed in the network loop, which answers no other peer meanwhile."""

BUSY_S = 0.25
"""A server is busy for so long after each request: longer than a client takes between two tokens."""

MIN_ITERATION_TOKENS, MAX_ITERATION_TOKENS = 64, 4096
"""Bounds of an iteration's size. Fewer tokens would make products inefficient; more would take memory for no gain."""

BACKWARD_TOKEN_COST = 3
"""Cost of a token in a backward, in forward tokens: the forward once more, and about two of them for the gradients."""

WAIT_FADE_S = 10.0
"""Seconds in which an observed waiting time loses all but 1/e of its weight."""

MAX_REMEMBERED_WAITS = 10.0
"""Weight, in requests, of all waiting times that are remembered, so that the estimate follows what comes next."""


def token_budget(tokens_per_second: float) -> int:
    """Tokens of one iteration, for blocks that compute `tokens_per_second` in batches."""
    return int(min(MAX_ITERATION_TOKENS, max(MIN_ITERATION_TOKENS, tokens_per_second * MAX_ITERATION_S)))


class QueueMeter:
    """How long requests wait for their first token: a weighted mean, which fades to 0 while none come.

    One thread may call `record_start` while another calls `expected_wait`.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, -math.inf)  # seconds waited and requests, weighted by their age; when that was

    def record_start(self, waited: float, now: float) -> None:
        """A request started at `now`, after it had waited for `waited` seconds."""
        seconds, requests, latest = self._aged(now)
        seconds, requests = seconds + max(0.0, waited), requests + 1
        scale = min(1.0, MAX_REMEMBERED_WAITS / requests)
        self._sums = (seconds * scale, requests * scale, latest)

    def expected_wait(self, now: float) -> float:
        """Seconds that a request which arrives at `now` may expect to wait."""
        seconds, requests, _ = self._aged(now)
        return seconds / max(requests, 1.0)

    def _aged(self, now: float) -> tuple[float, float, float]:
        seconds, requests, before = self._sums
        keep = math.exp(-max(0.0, now - before) / WAIT_FADE_S)
        return seconds * keep, requests * keep, max(before, now)


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits or is being computed.

    Attributes:
        number: smaller ones came earlier.
        future: gets the result, in `loop`.
        arrived_at: when it came.
        served_at: when it was last part of an iteration; until then, when it came.
        is_whole: it is computed in one piece, alone.
        is_short: a decode step rather than a prompt.
        computation: once it has started.
        compute_seconds: time spent in the blocks so far.
    """

    number: int
    request: ForwardWork | BackwardWork
    future: asyncio.Future[ComputeResult]
    loop: asyncio.AbstractEventLoop
    arrived_at: float
    served_at: float
    is_whole: bool
    is_short: bool
    computation: StepComputation | None = None
    compute_seconds: float = 0.0

    @property
    def is_urgent(self) -> bool:
        """A client waits for it, or it has begun: it lets others go first only once."""
        return self.request.urgent or self.computation is not None

    @property
    def tokens_left(self) -> int:
        """Tokens to compute, or the number of tokens that cost as much."""
        if self.computation is not None:
            return self.computation.tokens_left
        return self.request.layout.tokens * (BACKWARD_TOKEN_COST if self.is_whole else 1)

    def for_scheduler(self, now: float, trained_at: float) -> QueuedTokens:
        """What the scheduler needs to know, where `trained_at` is when any training was last served."""
        request = self.request
        return QueuedTokens(
            number=self.number,
            span=request.span,
            peer=request.peer,
            session=request.session,
            tokens=self.tokens_left,
            short=self.is_short,
            whole=self.is_whole,
            training=request.training,
            idle=now - (max(self.served_at, trained_at) if request.training else self.served_at),
            waited=now - self.served_at,
            urgent=self.is_urgent,
            joins_parts=request.joins_parts,
            token_cost=request.token_cost,
            weight=request.weight,
        )


class Engine:
    """Computes the requests of all peers of one server.

    Args:
        compute_thread: where it computes.
        budget: tokens of one iteration.
        observer: is told of every iteration.
        throughput: is told how long iterations of one request took.
        inline: whether a quick lone step may be computed in the network loop; not if computing may wait for a drive.
    """

    def __init__(
        self,
        compute_thread: ComputeThread,
        budget: int = MIN_ITERATION_TOKENS,
        observer: ServerObserver | None = None,
        inline: bool = True,
        throughput: ThroughputMeter | None = None,
    ) -> None:
        self._throughput = throughput
        self.compute_thread = compute_thread
        self._inline = inline
        self.budget = budget
        self._observer = observer or ServerObserver()
        self._arrived: deque[QueuedRequest] = deque()
        self._queue: dict[int, QueuedRequest] = {}
        self._shares = FairShares()
        self._meter = QueueMeter()
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._batching_delay = BatchingDelay()
        self._contention = CpuContentionMeter()
        self._running = False
        self._trained_at = -math.inf
        self._submitted_at = -math.inf

    @property
    def is_busy(self) -> bool:
        """Whether peers wait for what is computed, or have just done so."""
        return time.monotonic() - self._submitted_at < BUSY_S

    @property
    def sessions(self) -> int:
        """For how many sessions steps were computed lately."""
        return self._batching_delay.sessions

    @property
    def queue_seconds(self) -> float:
        """How long a request may expect to wait until its first token is computed."""
        return self._meter.expected_wait(time.monotonic())

    async def compute(self, request: ForwardWork | BackwardWork) -> ComputeResult:
        """Compute a request. Raises what decoding, computing or encoding it raises, or `ServerClosing`.

        The cache changes only if this returns. If the caller is cancelled, it may have changed or not.
        """
        return await self.submit(request)

    def submit(self, request: ForwardWork | BackwardWork) -> asyncio.Future[ComputeResult]:
        """What `compute` waits for. If the caller settles the future itself, the request or its result is dropped."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        is_whole = isinstance(request, BackwardWork)
        is_short = not is_whole and max(request.layout.counts) <= MAX_SHORT_TOKENS
        queued = QueuedRequest(next(self._numbers), request, loop.create_future(), loop, now, now, is_whole, is_short)
        self._submitted_at = now
        with self._lock:
            self._arrived.append(queued)
            self._batching_delay.on_request(request.session, now, request.span, request.joins_parts, request.urgent)
            self._lock.notify()
            start, self._running = not self._running, True
        if start and not self._try_compute_inline(queued):
            self._post_iteration()
        queued.future.add_done_callback(partial(self._on_settled, queued))
        return queued.future

    def _on_settled(self, queued: QueuedRequest, future: asyncio.Future[ComputeResult]) -> None:
        if not future.cancelled() and future.exception() is None:
            return self._observer.request_finished(queued.request.kind, time.monotonic() - queued.arrived_at)
        with self._lock:
            if queued in self._arrived:  # its caller gave it up; the iteration that runs may take long
                self._arrived.remove(queued)
                self._record_answers([queued])
            self._lock.notify()

    def _try_compute_inline(self, queued: QueuedRequest) -> bool:
        """Compute a request in this thread, if that takes less time than handing it to another one and back.

        In between, the other thread's processor has fallen asleep and its caches have gone cold (0.3 ms a step).
        """
        if not self._inline or queued.is_whole or queued.tokens_left > MAX_SHORT_TOKENS:
            return False
        if not 0 < self._batching_delay.iteration < MAX_INLINE_ITERATION_S or self._delay([queued], 0.0):
            return False
        return self.compute_thread.try_run_inline(partial(self._iterate, _settle_all))

    def _post_iteration(self) -> None:
        def wait_and_iterate() -> None:
            self._wait_for_sessions()
            self._iterate()

        if not self.compute_thread.post(wait_and_iterate):
            self._fail_all(ServerClosing("this server is leaving; use another one"))

    def _fail_all(self, error: BaseException) -> None:
        """Answer all requests with an error."""
        with self._lock:
            left, self._running = [*self._queue.values(), *self._arrived], False
            self._queue.clear()
            self._arrived.clear()
        _deliver_results([(queued, error) for queued in left])

    def _iterate(self, deliver: Callable[[Sequence[_Result]], None] | None = None) -> None:
        """Compute one iteration, and post the next one if requests are left.

        Args:
            deliver: takes the results; None where this is not the loop that waits for them.
        """
        with self._lock:
            for queued in self._arrived:
                self._queue[queued.number] = queued
            self._arrived.clear()
            self._remove([queued for queued in self._queue.values() if queued.future.done()])
        results = result_or_error(self._compute_next_batch, time.monotonic())
        if isinstance(results, BaseException):  # a fault of the engine itself: without an answer, peers wait for ever
            return self._fail_all(results)
        with self._lock:
            self._remove([queued for queued, _ in results])
            self._running = running = bool(self._queue or self._arrived)
        (deliver or _deliver_results)(results)
        if running:
            self._post_iteration()

    def _compute_next_batch(self, now: float) -> list[_Result]:
        """Compute the next batch. Returns the results of the requests that are finished or have failed."""
        chosen = self._choose(now)
        if chosen and chosen[0][0].is_whole:
            return [(queued, result_or_error(self._compute_backward, queued, now)) for queued, _ in chosen]
        results: list[_Result] = []
        begun = []
        for queued, tokens in chosen:
            if queued.computation is None:
                self._record_start(queued, now)
                started = result_or_error(_start_computation, queued)
                if isinstance(started, BaseException):
                    results.append((queued, started))
                    continue
                queued.computation = started
            begun.append((queued, tokens))
        if begun:
            results += self._advance(begun, now)
        for queued, _ in begun:
            if queued.computation is not None and not queued.computation.tokens_left:
                results.append((queued, result_or_error(_finish_computation, queued)))
        return results

    def _choose(self, now: float) -> list[tuple[QueuedRequest, int]]:
        """The requests of the next iteration, and how many tokens of each."""
        if len(self._queue) == 1:
            (alone,) = self._queue.values()
            chosen = [(alone, alone.tokens_left if alone.is_whole else min(alone.tokens_left, self.budget))]
        else:
            waiting = [queued.for_scheduler(now, self._trained_at) for queued in self._queue.values()]
            batch = next_batch(waiting, self._shares, self.budget)
            self._shares.charge_batch(waiting, batch)
            chosen = [(self._queue[part.number], part.tokens) for part in batch]
        for queued, _ in chosen:
            if queued.request.training:
                self._trained_at = now
        return chosen

    def _wait_for_sessions(self) -> None:
        """Wait for sessions that are about to come back, unless there is a prompt to compute meanwhile."""
        began = time.monotonic()
        with self._lock:
            while (waiting := self._waiting()) and all(queued.is_short for queued in waiting):
                delay = self._delay(waiting, time.monotonic() - began)
                if not delay:
                    return
                self._lock.wait(delay)

    def _delay(self, waiting: Sequence[QueuedRequest], waited: float) -> float:
        """Seconds that these requests should wait for more, having waited for `waited` seconds."""
        if self._batching_delay.sessions < 2:
            return 0.0
        urgent = [queued for queued in waiting if queued.is_urgent]
        oldest = min(urgent or waiting, key=lambda queued: (queued.served_at, queued.number)).request
        return self._batching_delay.delay(
            len(urgent),
            waited,
            self._contention.groups(torch.get_num_threads()),
            time.monotonic(),
            oldest.span,
            oldest.joins_parts,
            len(waiting) - len(urgent),
        )

    def _waiting(self) -> list[QueuedRequest]:
        """The requests that are still wanted. The caller holds the lock."""
        return [queued for queued in (*self._queue.values(), *self._arrived) if not queued.future.done()]

    def _remove(self, finished: Sequence[QueuedRequest]) -> None:
        """Take requests out of the queue. The caller holds the lock."""
        if finished:
            for queued in finished:
                del self._queue[queued.number]
            self._record_answers(finished)

    def _record_answers(self, finished: Sequence[QueuedRequest]) -> None:
        """Note that sessions are away, unless another request of theirs waits already. The caller holds the lock."""
        waiting = {queued.request.session for queued in self._waiting()} if self._queue or self._arrived else ()
        answered = {queued.request.session for queued in finished}
        for session in answered.difference(waiting):
            self._batching_delay.on_answer(session, time.monotonic())

    def _record_start(self, queued: QueuedRequest, now: float) -> None:
        self._meter.record_start(now - queued.arrived_at, now)
        self._observer.request_started(now - queued.arrived_at)

    def _compute_backward(self, queued: QueuedRequest, now: float) -> ComputeResult:
        self._record_start(queued, now)
        request = queued.request
        assert isinstance(request, BackwardWork)
        inputs, gradients = (tensor.to(request.model.dtype) for tensor in request.decode())
        began = time.perf_counter()
        found = compute_gradients(request.model, inputs, gradients, request.layout, request.adapter)
        seconds = time.perf_counter() - began
        self._observer.iteration_finished([(request.kind, request.layout.sequences, request.layout.tokens)], seconds)
        return ComputeResult(request.encode(found), seconds * 1e3)

    def _advance(self, chosen: Sequence[tuple[QueuedRequest, int]], now: float) -> list[_Result]:
        """Compute tokens of several requests together. If that fails, compute each half alone, down to the culprits."""
        began = time.perf_counter()
        error = result_or_error(_advance_together, chosen)
        if error is not None and len(chosen) > 1:
            middle = len(chosen) // 2
            return self._advance(chosen[:middle], now) + self._advance(chosen[middle:], now)
        seconds = time.perf_counter() - began
        computed, short = [], True
        for queued, tokens in chosen:
            queued.compute_seconds += seconds
            queued.served_at = now
            short = short and queued.is_short
            computed.append((queued.request.kind, queued.request.layout.sequences, tokens))
        if error is not None:
            for queued, _ in chosen:
                queued.computation = None
            return [(queued, error) for queued, _ in chosen]
        self._observer.iteration_finished(computed, seconds)
        if self._throughput is not None and len(chosen) == 1:
            ((queued, tokens),) = chosen
            if isinstance(queued.request, ForwardWork) and queued.request.exits is None:
                self._throughput.record(queued.request.span.length, tokens, seconds)
        if short:
            self._batching_delay.on_iteration(seconds)
        return []


_Result = tuple[QueuedRequest, ComputeResult | BaseException]


def _start_computation(queued: QueuedRequest) -> StepComputation:
    request = queued.request
    assert isinstance(request, ForwardWork)
    return request.cache.start_step(request.decode().to(request.cache.model.dtype), request.layout, request.exits)


def _advance_together(chosen: Sequence[tuple[QueuedRequest, int]]) -> None:
    parts = []
    for queued, tokens in chosen:
        if (computation := queued.computation) is not None:
            parts.append((computation, min(tokens, computation.tokens_left)))
    advance_steps(parts)


def _finish_computation(queued: QueuedRequest) -> ComputeResult:
    """Encode the outputs of a request that is computed, and commit it to the session's cache."""
    assert queued.computation is not None
    assert isinstance(queued.request, ForwardWork)
    payload = queued.request.encode(queued.computation.output)
    queued.computation.commit()
    exits = queued.computation.exits
    return ComputeResult(payload, queued.compute_seconds * 1e3, exits.left if exits is not None else ())


def _deliver_results(results: Sequence[_Result]) -> None:
    """Hand results to the loops that wait for them, with one wake-up for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Result]] = {}
    for queued, result in results:
        by_loop.setdefault(queued.loop, []).append((queued, result))
    for loop, answers in by_loop.items():
        call_in_loop(loop, _settle_all, answers)


def _settle_all(results: Sequence[_Result]) -> None:
    for queued, result in results:
        settle_future(queued.future, result)
