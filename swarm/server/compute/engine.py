"""The loop around the scheduler: collects the requests of all sessions, has the scheduler choose, and computes,
iteration after iteration, in the compute thread. An error in one request never reaches another.

Blocks that take a millisecond or two (small models, few blocks) compute a lone step in the network loop, because two
changes of thread would cost as much."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from swarm.common.outcome import result_or_error
from swarm.errors import ServerClosing
from swarm.metrics.server import ServerObserver
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.session_cache import StepComputation, advance_steps
from swarm.server.compute.batching_delay import BatchingDelay
from swarm.server.compute.compute_request import BackwardWork, ComputeResult, ForwardWork
from swarm.server.compute.compute_thread import ComputeThread, call_in_loop, settle_future
from swarm.server.compute.cpu_contention import CpuContentionMeter
from swarm.server.compute.queue_meter import QueueMeter
from swarm.server.compute.queued_request import QueuedRequest
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, FairShares, next_batch

MAX_ITERATION_S = 0.2
"""How long an iteration should take at most, because a decode step may have to wait for the chunk of a prompt."""

MAX_INLINE_ITERATION_S = 5e-3
"""A shorter iteration may be computed in the network loop, which answers no other peer meanwhile."""

BUSY_S = 0.25
"""A server is busy for so long after each request: longer than a client takes between two tokens."""

MIN_ITERATION_TOKENS, MAX_ITERATION_TOKENS = 64, 4096
"""Bounds of an iteration's size. Fewer tokens would make products inefficient; more would take memory for no gain."""


def token_budget(tokens_per_second: float) -> int:
    """Tokens of one iteration, for blocks that compute `tokens_per_second` in batches."""
    return int(min(MAX_ITERATION_TOKENS, max(MIN_ITERATION_TOKENS, tokens_per_second * MAX_ITERATION_S)))


class Engine:
    """Computes the requests of all peers of one server.

    Args:
        compute_thread: where it computes.
        budget: tokens of one iteration.
        observer: is told of every iteration.
        inline: whether a quick lone step may be computed in the network loop; not if computing may wait for a drive.
        on_served: is told of each peer for which tokens were computed, and how many.
    """

    def __init__(
        self,
        compute_thread: ComputeThread,
        budget: int = MIN_ITERATION_TOKENS,
        observer: ServerObserver | None = None,
        inline: bool = True,
        on_served: Callable[[str, int], None] | None = None,
    ) -> None:
        self.compute_thread = compute_thread
        self._inline = inline
        self._on_served = on_served or _ignore
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
    def queue_seconds(self) -> float:
        """How long a request may expect to wait until its first token is computed."""
        return self._meter.expected_wait(time.monotonic())

    async def compute(self, request: ForwardWork | BackwardWork) -> ComputeResult:
        """Compute a request. Raises what decoding, computing or encoding it raises, or `ServerClosing`.

        The cache changes only if this returns. If the caller is cancelled, it may have changed or not.
        """
        return await self.submit(request)

    def submit(self, request: ForwardWork | BackwardWork) -> asyncio.Future[ComputeResult]:
        """What `compute` waits for. A request whose future is settled by another hand is dropped, or its result is."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        queued = QueuedRequest(next(self._numbers), request, loop.create_future(), loop, now, now)
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

    def expedite(self, future: asyncio.Future[ComputeResult]) -> None:
        """Someone waits for a request that was not urgent when it was submitted."""
        with self._lock:
            for queued in self._waiting():
                if queued.future is future:
                    queued.is_awaited = True
            self._lock.notify()

    def _on_settled(self, queued: QueuedRequest, future: asyncio.Future[ComputeResult]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._on_served(queued.request.peer, queued.request.layout.tokens)
            return self._observer.request_finished(queued.request.kind, time.monotonic() - queued.arrived_at)
        with self._lock:
            if queued in self._arrived:  # settled by another hand; the iteration that runs may take long
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
        return self.compute_thread.try_run_inline(self._iterate)

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

    def _iterate(self) -> None:
        """Compute one iteration, and post the next one if requests are left."""
        self._enqueue_arrived()
        results = result_or_error(self._compute_next_batch, time.monotonic())
        if isinstance(
            results, BaseException
        ):  # a fault of the engine itself: unanswered, the peers would wait for ever
            return self._fail_all(results)
        self._remove_requests([queued for queued, _ in results])
        _deliver_results(results)
        with self._lock:
            self._running = running = bool(self._queue or self._arrived)
        if running:
            self._post_iteration()

    def _compute_next_batch(self, now: float) -> list[_Result]:
        """Compute the next batch. Returns the results of the requests that are finished or have failed."""
        waiting = [queued.for_scheduler(now, self._trained_at) for queued in self._queue.values()]
        batch = next_batch(waiting, self._shares, self.budget)
        self._shares.charge_batch(waiting, batch)
        chosen = [(self._queue[part.number], part.tokens) for part in batch]
        if any(queued.request.training for queued, _ in chosen):
            self._trained_at = now
        if chosen and chosen[0][0].is_whole:
            return [(queued, result_or_error(self._compute_backward, queued, now)) for queued, _ in chosen]
        results = self._start_computations([queued for queued, _ in chosen], now)
        results += self._advance([(queued, tokens) for queued, tokens in chosen if queued.computation is not None], now)
        finished = [one for one, _ in chosen if one.computation is not None and not one.computation.tokens_left]
        results += [(queued, result_or_error(_finish_computation, queued)) for queued in finished]
        return results

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
            self._contention.level(),
            time.monotonic(),
            oldest.span,
            oldest.joins_parts,
            len(waiting) - len(urgent),
        )

    def _waiting(self) -> list[QueuedRequest]:
        """The requests that are still wanted. The caller holds the lock."""
        return [queued for queued in (*self._queue.values(), *self._arrived) if not queued.future.done()]

    def _enqueue_arrived(self) -> None:
        """Take the requests that have arrived into the queue, and drop those that were settled by another hand."""
        with self._lock:
            self._queue.update((queued.number, queued) for queued in self._arrived)
            self._arrived.clear()
        self._remove_requests([queued for queued in self._queue.values() if queued.future.done()])

    def _remove_requests(self, finished: Sequence[QueuedRequest]) -> None:
        with self._lock:
            for queued in finished:
                del self._queue[queued.number]
            self._record_answers(finished)

    def _record_answers(self, finished: Sequence[QueuedRequest]) -> None:
        """Note that sessions are away, unless another request of theirs waits already. The caller holds the lock."""
        waiting = {queued.request.session for queued in self._waiting()}
        for session in {queued.request.session for queued in finished} - waiting:
            self._batching_delay.on_answer(session, time.monotonic())

    def _start_computations(self, chosen: Sequence[QueuedRequest], now: float) -> list[_Result]:
        """Start the requests that have not been started. Returns the errors of those that cannot be."""
        failed: list[_Result] = []
        for queued in chosen:
            if queued.computation is None:
                self._record_start(queued, now)
                started = result_or_error(_start_computation, queued)
                if isinstance(started, BaseException):
                    failed.append((queued, started))
                else:
                    queued.computation = started
        return failed

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
        self._observer.iteration_finished([queued.for_observer(request.layout.tokens)], seconds)
        return ComputeResult(request.encode(found), seconds * 1e3)

    def _advance(self, chosen: Sequence[tuple[QueuedRequest, int]], now: float) -> list[_Result]:
        """Compute tokens of several requests together. If that fails, compute each half alone, down to the culprits."""
        if not chosen:
            return []
        began = time.perf_counter()
        error = result_or_error(_advance_together, chosen)
        if error is not None and len(chosen) > 1:
            middle = len(chosen) // 2
            return self._advance(chosen[:middle], now) + self._advance(chosen[middle:], now)
        seconds = time.perf_counter() - began
        if error is None:
            self._observer.iteration_finished([queued.for_observer(tokens) for queued, tokens in chosen], seconds)
            if all(queued.is_short for queued, _ in chosen):
                self._batching_delay.on_iteration(seconds)
        for queued, _ in chosen:
            queued.compute_seconds += seconds
            queued.served_at = now
            if error is not None:
                queued.computation = None
        return [(queued, error) for queued, _ in chosen] if error is not None else []


def _ignore(*counts: object) -> None: ...


_Result = tuple[QueuedRequest, ComputeResult | BaseException]


def _start_computation(queued: QueuedRequest) -> StepComputation:
    request = queued.request
    assert isinstance(request, ForwardWork)
    return request.cache.start_step(request.decode().to(request.cache.model.dtype), request.layout, request.exits)


def _advance_together(chosen: Sequence[tuple[QueuedRequest, int]]) -> None:
    parts = [(queued.computation, tokens) for queued, tokens in chosen if queued.computation is not None]
    advance_steps([(computation, min(tokens, computation.tokens_left)) for computation, tokens in parts])


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
    for loop in {queued.loop for queued, _ in results}:
        call_in_loop(loop, _settle_all, [(queued.future, result) for queued, result in results if queued.loop is loop])


def _settle_all(results: Sequence[tuple[asyncio.Future[ComputeResult], ComputeResult | BaseException]]) -> None:
    for future, result in results:
        settle_future(future, result)
