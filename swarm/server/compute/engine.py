"""The loop around the scheduler: takes what all sessions wait for, lets it decide, and computes, iteration after
iteration, in the compute thread. One request's trouble never reaches another.

Blocks that take a millisecond or two (small models, few blocks) compute a lone step in the network loop: two changes of
thread would cost as much."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.errors import ServerClosing
from swarm.metrics.server import ServerObserver
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.session_cache import advance_steps
from swarm.server.compute.batching_delay import BatchingDelay
from swarm.server.compute.compute_request import BackwardWork, ComputeResult, ForwardWork
from swarm.server.compute.compute_thread import ComputeThread, call_in_loop, settle_future
from swarm.server.compute.cpu_contention import CpuContentionMeter
from swarm.server.compute.queue_meter import QueueMeter
from swarm.server.compute.queued_request import QueuedRequest
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, FairShares, next_batch

MAX_ITERATION_S = 0.2
"""Seconds that an iteration should take at most: so long a decode step may wait for a prompt's chunk."""

MAX_INLINE_ITERATION_S = 5e-3
"""Seconds. An iteration of less may be computed in the network loop, which answers nobody else meanwhile."""

MIN_ITERATION_TOKENS, MAX_ITERATION_TOKENS = 64, 4096
"""Tokens of an iteration. Fewer would make products inefficient; more would take memory and gain nothing."""


def token_budget(tokens_per_second: float) -> int:
    """Tokens of one iteration, for blocks that compute so many tokens a second in batches."""
    return int(min(MAX_ITERATION_TOKENS, max(MIN_ITERATION_TOKENS, tokens_per_second * MAX_ITERATION_S)))


@dataclass
class Engine:
    """Attributes:
    runtime: the compute thread.
    budget: tokens of one iteration.
    observer: hears of every iteration.
    """

    runtime: ComputeThread
    budget: int = MIN_ITERATION_TOKENS
    observer: ServerObserver = field(default_factory=ServerObserver)
    _incoming: deque[QueuedRequest] = field(default_factory=deque)
    _entries: dict[int, QueuedRequest] = field(default_factory=dict)
    _shares: FairShares = field(default_factory=FairShares)
    _meter: QueueMeter = field(default_factory=QueueMeter)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _gathering: BatchingDelay = field(default_factory=BatchingDelay)
    _contention: CpuContentionMeter = field(default_factory=CpuContentionMeter)
    _running: bool = False
    _trained: float = -math.inf

    @property
    def queue_seconds(self) -> float:
        """How long a request may expect to wait for its first token to be computed."""
        return self._meter.seconds(time.monotonic())

    async def compute(self, request: ForwardWork | BackwardWork) -> ComputeResult:
        """Compute a request. Raises what decoding, computing or encoding it raises, or `ServerClosing`.

        The cache changes only if this returns, or would have: a caller that is cancelled may find either.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        entry = QueuedRequest(next(self._numbers), request, loop.create_future(), loop, came=now, served=now)
        with self._lock:
            self._incoming.append(entry)
            self._gathering.came(request.session, now)
            self._lock.notify()
            start, self._running = not self._running, True
        if start and not self._at_once(entry):
            self._go_on()
        outcome = await entry.future
        self.observer.step(request.kind, time.monotonic() - now)
        return outcome

    def _at_once(self, entry: QueuedRequest) -> bool:
        """Compute a request in this thread, if that takes less than is lost by handing it to another one and back.

        In between, the other thread's processor has fallen asleep and its caches have gone cold (0.3 ms a step).
        """
        if (
            entry.whole
            or entry.left > MAX_SHORT_TOKENS
            or not 0 < self._gathering.iteration < MAX_INLINE_ITERATION_S
            or self._patience(1, 0.0)
        ):
            return False
        return self.runtime.try_now(self._iterate)

    def _go_on(self) -> None:
        def gather_and_iterate() -> None:
            self._gather()
            self._iterate()

        if not self.runtime.post(gather_and_iterate):
            self._give_up(ServerClosing("this server is leaving; use another one"))

    def _give_up(self, error: BaseException) -> None:
        """Nothing that waits will be computed."""
        with self._lock:
            left, self._running = [*self._entries.values(), *self._incoming], False
            self._entries.clear()
            self._incoming.clear()
        _settle([(entry, error) for entry in left])

    def _iterate(self) -> None:
        """One iteration."""
        try:
            self._take_in()
            settled = self._compute_next(time.monotonic())
        except BaseException as error:  # no request's fault: whoever waits has to hear of it
            return self._give_up(error)
        self._forget([entry for entry, _ in settled])
        _settle(settled)
        with self._lock:
            self._running = running = bool(self._entries or self._incoming)
        if running:
            self._go_on()

    def _compute_next(self, now: float) -> list[_Settled]:
        """Compute the next batch; what became of the requests that are through with it, one way or the other."""
        waiting = [entry.waiting(now, self._trained) for entry in self._entries.values()]
        batch = next_batch(waiting, self._shares, self.budget)
        self._shares.charge(waiting, batch)
        chosen = [(self._entries[portion.number], portion.tokens) for portion in batch]
        if any(entry.request.training for entry, _ in chosen):
            self._trained = now
        if chosen and chosen[0][0].whole:
            return [self._backward(entry, now) for entry, _ in chosen]
        settled = self._begin([entry for entry, _ in chosen], now)
        settled += self._advance([(entry, tokens) for entry, tokens in chosen if entry.work is not None], now)
        settled += [
            (entry, _finished(entry)) for entry, _ in chosen if entry.work is not None and not entry.work.tokens_left
        ]
        return settled

    def _gather(self) -> None:
        """Wait for sessions that are about to come, unless a prompt is to compute anyway."""
        began = time.monotonic()
        with self._lock:
            while all(entry.short for entry in (*self._entries.values(), *self._incoming)):
                patience = self._patience(len(self._entries) + len(self._incoming), time.monotonic() - began)
                if not patience:
                    return
                self._lock.wait(patience)

    def _patience(self, waiting: int, waited: float) -> float:
        """Seconds that `waiting` requests should wait for more, after they have waited so long."""
        if self._gathering.sessions < 2:
            return 0.0
        return self._gathering.patience(waiting, waited, self._contention.level(), time.monotonic())

    def _take_in(self) -> None:
        while self._incoming:
            entry = self._incoming.popleft()
            self._entries[entry.number] = entry
        self._forget([entry for entry in self._entries.values() if entry.future.cancelled()])

    def _forget(self, entries: Sequence[QueuedRequest]) -> None:
        """These requests are over."""
        with self._lock:
            for entry in entries:
                del self._entries[entry.number]
                self._gathering.answered(entry.request.session, time.monotonic())

    def _begin(self, entries: Sequence[QueuedRequest], now: float) -> list[_Settled]:
        failed: list[_Settled] = []
        for entry in entries:
            if entry.work is not None:
                continue
            self._started(entry, now)
            request = entry.request
            assert isinstance(request, ForwardWork)
            try:
                entry.work = request.cache.start_step(request.decode().to(request.cache.model.dtype), request.layout)
            except BaseException as error:
                failed.append((entry, error))
        return failed

    def _started(self, entry: QueuedRequest, now: float) -> None:
        self._meter.started(now - entry.came, now)
        self.observer.started(now - entry.came)

    def _backward(self, entry: QueuedRequest, now: float) -> _Settled:
        self._started(entry, now)
        request = entry.request
        assert isinstance(request, BackwardWork)
        try:
            inputs, gradients = (tensor.to(request.model.dtype) for tensor in request.decode())
            began = time.perf_counter()
            found = compute_gradients(request.model, inputs, gradients, request.layout, request.adapter)
            seconds = time.perf_counter() - began
            self.observer.iteration([entry.portion(request.layout.tokens)], seconds)
            return entry, ComputeResult(request.encode(found), seconds * 1e3)
        except BaseException as error:
            return entry, error

    def _advance(self, portions: Sequence[tuple[QueuedRequest, int]], now: float) -> list[_Settled]:
        """Compute the portions together; if that fails, each half alone, down to the ones that are to blame."""
        began = time.perf_counter()
        failed: list[_Settled] = []
        try:
            works = [(entry.work, tokens) for entry, tokens in portions if entry.work is not None]
            advance_steps([(work, min(tokens, work.tokens_left)) for work, tokens in works])
        except BaseException as error:
            if len(portions) > 1:
                middle = len(portions) // 2
                return self._advance(portions[:middle], now) + self._advance(portions[middle:], now)
            failed = [(entry, error) for entry, _ in portions]
            for entry, _ in portions:
                entry.work = None
        seconds = time.perf_counter() - began
        if portions and not failed:
            self.observer.iteration([entry.portion(tokens) for entry, tokens in portions], seconds)
        if all(entry.short for entry, _ in portions):
            self._gathering.computed(seconds)
        for entry, _ in portions:
            entry.seconds += seconds
            entry.served = now
        return failed


_Settled = tuple[QueuedRequest, ComputeResult | BaseException]


def _finished(entry: QueuedRequest) -> ComputeResult | BaseException:
    """Commit a request that is computed, and encode its outputs."""
    assert entry.work is not None
    assert isinstance(entry.request, ForwardWork)
    try:
        payload = entry.request.encode(entry.work.output)
        entry.work.commit()
    except BaseException as error:
        return error
    return ComputeResult(payload, entry.seconds * 1e3)


def _settle(settled: Sequence[_Settled]) -> None:
    """Hand results to their loops; one wake-up for each loop."""
    for loop in {entry.loop for entry, _ in settled}:
        call_in_loop(loop, _deliver, [(entry.future, result) for entry, result in settled if entry.loop is loop])


def _deliver(results: Sequence[tuple[asyncio.Future[ComputeResult], ComputeResult | BaseException]]) -> None:
    for future, result in results:
        if isinstance(result, BaseException):
            settle_future(future, None, result)
        else:
            settle_future(future, result, None)
