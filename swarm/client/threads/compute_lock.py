"""One lock on the computing of this process: the threads of several lanes compute one at a time.

A lane releases the lock whenever it waits for the network, and queues for it again when the reply has come. So the
client's own part (embeddings, first blocks, head, sampling) is one stage of the pipeline, as each server is, and
threads do not disturb each other within a step.

Work that reads much memory for each lane (the head of a large vocabulary) is batched for all lanes that are ready.

All lanes share torch's random generators. Each lane restores its own state when it gets the lock and captures it when
it releases the lock, so that its samples do not depend on the order of the lanes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from swarm.common.outcome import result_or_error

T = TypeVar("T")
R = TypeVar("R")


class RandomState:
    """A state of torch's random generators: the CPU's, and that of the device on which a model samples.

    Args:
        device: where the model samples.
        seed: start as after `torch.manual_seed(seed)`; None captures the current state.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device = device
        self._states: list[torch.Tensor] = []
        if seed is None:
            self.capture()
        else:
            self._states = [torch.Generator(one).manual_seed(seed).get_state() for one in self._devices]

    def restore(self) -> None:
        """Set torch's generators to this state."""
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)

    def capture(self) -> None:
        """Save the current state of torch's generators."""
        self._states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(self._device))

    @property
    def _devices(self) -> list[torch.device]:
        return [torch.device("cpu"), *([self._device] if self._device.type == "cuda" else [])]


class ComputeLock:
    """A lock for the lanes of one model; it is granted in the order in which lanes became ready."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_held = False
        self._ready: deque[ComputeTicket] = deque()
        self._yielded: deque[ComputeTicket] = deque()
        """Tickets that let the ready ones go first."""
        self._batch: list[_BatchItem] = []

    def request(self, ticket: ComputeTicket) -> None:
        """Grant the lock to `ticket` now if it is free, else after the tickets that requested it before."""
        with self._mutex:
            if self._is_held:
                self._ready.append(ticket)
                return
            self._is_held = True
        ticket.grant()

    def release(self) -> None:
        """The holder releases the lock; the next ticket gets it."""
        with self._mutex:
            if not self._ready and not self._yielded:
                self._is_held = False
                return
            ticket = (self._ready or self._yielded).popleft()
        ticket.grant()

    def yield_to_ready(self, ticket: ComputeTicket) -> bool:
        """The holder lets all ready tickets go first; it has to wait for a new grant. False if none is ready."""
        with self._mutex:
            if not self._ready:
                return False
            self._yielded.append(ticket)
            following = self._ready.popleft()
        following.grant()
        return True

    def add_to_batch(self, value: Any) -> _BatchItem:
        """The holder adds a value to the next batch."""
        self._batch.append(_BatchItem(value))
        return self._batch[-1]

    def compute_batch(self, work: Callable[[list[Any]], Sequence[Any]]) -> None:
        """The holder computes the whole batch; tickets that yielded for it become ready."""
        items, self._batch = self._batch, []
        results = result_or_error(lambda: list(zip(items, work([item.value for item in items]), strict=True)))
        if isinstance(results, BaseException):
            for item in items:
                item.error = results
        else:
            for item, result in results:
                item.result = result
        with self._mutex:
            self._ready.extend(self._yielded)
            self._yielded.clear()


@dataclass
class _BatchItem:
    """One lane's value in a batch; `result` or `error` is set when the batch has been computed."""

    value: Any
    result: Any = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


def keep_thread_limit() -> None:
    """Keep to the limit that the process has set: matrix products in a new thread would use all cores."""
    torch.set_num_threads(torch.get_num_threads())


class ComputeTicket:
    """One lane's claim to the lock; a context manager inside which its thread holds the lock unless it waits.

    Args:
        lock: shared by the lanes.
        random: the lane's own state of the random generators; None leaves the generators alone.
    """

    def __init__(self, lock: ComputeLock, random: RandomState | None = None) -> None:
        self._lock = lock
        self._random = random
        self._granted = threading.Lock()
        self._granted.acquire()
        self._waiting_for: Future[Any] | None = None
        self._cancelled = False

    def __enter__(self) -> ComputeTicket:
        keep_thread_limit()
        self._lock.request(self)
        self._wait_for_grant()
        _current.ticket = self
        return self

    def __exit__(self, *exception: object) -> None:
        _current.ticket = None
        self._release()

    def wait(self, future: Future[T]) -> T:
        """The future's result; other lanes compute meanwhile. Raises `CancelledError` after `cancel`."""
        # Store first, then check: whatever `cancel` does in another thread, one of the two sees the other.
        self._waiting_for = future
        if self._cancelled:
            future.cancel()
        self._release()
        future.add_done_callback(lambda _: self._lock.request(self))
        self._wait_for_grant()
        self._waiting_for = None
        if self._cancelled:
            raise CancelledError
        return future.result()

    def compute_batched(self, value: T, work: Callable[[list[T]], Sequence[R]]) -> R:
        """The result of `work` for `value`, computed in one batch with the values of other lanes that are ready.

        Args:
            work: takes a list of values and returns their results in order, none of them None. The same for all lanes.
        """
        item = self._lock.add_to_batch(value)
        if self._random is not None:
            self._random.capture()
        if self._lock.yield_to_ready(self):
            self._wait_for_grant()
        if not item.done:
            self._lock.compute_batch(work)
        if item.error is not None:
            raise item.error
        result: R = item.result
        return result

    def cancel(self) -> None:
        """Cancel this and every later wait. For other threads."""
        self._cancelled = True
        future = self._waiting_for
        if future is not None:
            future.cancel()

    def grant(self) -> None:
        """The lock is this ticket's now. For `ComputeLock`."""
        self._granted.release()

    def _wait_for_grant(self) -> None:
        self._granted.acquire()
        if self._random is not None:
            self._random.restore()

    def _release(self) -> None:
        if self._random is not None:
            self._random.capture()
        self._lock.release()


class _CurrentTicket(threading.local):
    """The ticket of the current thread."""

    ticket: ComputeTicket | None = None


_current = _CurrentTicket()


def current_ticket() -> ComputeTicket | None:
    """The ticket inside which the current thread runs, or None."""
    return _current.ticket


@contextmanager
def shared_with_no_lane() -> Iterator[None]:
    """Meanwhile, this thread computes all of its work itself; it keeps the lock if it has it, and must not wait."""
    ticket, _current.ticket = _current.ticket, None
    try:
        yield
    finally:
        _current.ticket = ticket


def share_head(head: nn.Module) -> None:
    """Patch `head` so that lanes that are ready at the same time compute it in one batch.

    Only inputs of one sequence and one token, `[1, 1, width]`, are batched.
    """
    compute_alone = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if has_torch_function_unary(hidden):  # what records torch's calls sees this one
            return handle_torch_function(forward, (hidden,), hidden)  # type: ignore[no-any-return]
        ticket = current_ticket()
        if ticket is None or torch.is_grad_enabled() or hidden.shape[:-1] != (1, 1):
            return compute_alone(hidden)  # type: ignore[no-any-return]
        return ticket.compute_batched(hidden, compute_together)

    def compute_together(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(inputs) == 1:
            return [compute_alone(inputs[0])]
        return compute_alone(torch.cat(inputs)).split(1)  # type: ignore[no-any-return]

    head.forward = forward  # type: ignore[method-assign]
