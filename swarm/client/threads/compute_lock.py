"""Who computes: of several threads that share this process's torch, one at a time; the others wait for the swarm.

A lane hands the baton on whenever it waits for the network, and stands in line for it again once its answer is there.
So the client's own part (embeddings, first blocks, head, sampling) is one stage of the pipeline, like each server is,
and threads do not disturb each other in the middle of a step.

What reads much memory for each lane alone (the head of a large vocabulary) is done `together` for all that are ready.

The stage has one random generator, torch's own. Each lane brings its state along and takes it away again, so that what
a lane samples does not depend on who was quicker.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class RandomState:
    """A state of torch's generators: of the CPU's, and of the device's that a model samples on.

    Args:
        device: where the model samples.
        seed: begin as after `torch.manual_seed(seed)`; None takes the generators' state as it is now.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device = device
        self._states: list[torch.Tensor] = []
        if seed is None:
            self.take()
        else:
            self._states = [torch.Generator(one).manual_seed(seed).get_state() for one in self._devices]

    def put(self) -> None:
        """Let the generators go on from this state."""
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)

    def take(self) -> None:
        """Remember where the generators are now."""
        self._states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(self._device))

    @property
    def _devices(self) -> list[torch.device]:
        return [torch.device("cpu"), *([self._device] if self._device.type == "cuda" else [])]


class ComputeLock:
    """Held by one lane at a time; handed on in the order in which lanes became ready."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._ready: deque[ComputeTicket] = deque()
        self._aside: deque[ComputeTicket] = deque()
        """Those that let others go first."""
        self._shares: list[_Share] = []

    def ask(self, turn: ComputeTicket) -> None:
        """`turn` is ready to compute: now, if nobody does, else when those before it have handed on."""
        with self._lock:
            if self._held:
                self._ready.append(turn)
                return
            self._held = True
        turn.go()

    def hand_on(self) -> None:
        """Who holds the baton needs it no more."""
        with self._lock:
            if not self._ready and not self._aside:
                self._held = False
                return
            turn = (self._ready or self._aside).popleft()
        turn.go()

    def step_aside(self, turn: ComputeTicket) -> bool:
        """`turn`, which holds the baton, lets all go first that are ready. False if nobody is."""
        with self._lock:
            if not self._ready:
                return False
            self._aside.append(turn)
            following = self._ready.popleft()
        following.go()
        return True

    def share(self, value: Any) -> _Share:
        """A value that waits to be computed with others. For who holds the baton."""
        self._shares.append(_Share(value))
        return self._shares[-1]

    def compute(self, work: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Compute all that waits, and let those that wait for it go on. For who holds the baton."""
        shares, self._shares = self._shares, []
        try:
            for share, result in zip(shares, work([share.value for share in shares]), strict=True):
                share.result = result
        except BaseException as error:
            for share in shares:
                share.error = error
        with self._lock:
            self._ready.extend(self._aside)
            self._aside.clear()


@dataclass
class _Share:
    """One lane's part of what is computed together; `result` or `error` is set when it is done."""

    value: Any
    result: Any = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class ComputeTicket:
    """One lane's place in line; a context manager, inside which its thread holds the baton unless it waits.

    Args:
        baton: what the lanes share.
        random: the lane's own state of the generators; None leaves them alone.
    """

    def __init__(self, baton: ComputeLock, random: RandomState | None = None) -> None:
        self._baton = baton
        self._random = random
        self._may_go = threading.Lock()
        self._may_go.acquire()
        self._waiting_for: Future[Any] | None = None
        self._ended = False

    def __enter__(self) -> ComputeTicket:
        # A new thread's matrix products would take all cores, whatever the process was told.
        torch.set_num_threads(torch.get_num_threads())
        self._baton.ask(self)
        self._take()
        _current.turn = self
        return self

    def __exit__(self, *exception: object) -> None:
        _current.turn = None
        self._give()

    def wait(self, future: Future[T]) -> T:
        """The future's result; others compute meanwhile. Raises `CancelledError` once the turn has been ended."""
        # First noted, then looked: whatever `end` does in another thread, one of the two sees the other.
        self._waiting_for = future
        if self._ended:
            future.cancel()
        self._give()
        future.add_done_callback(lambda _: self._baton.ask(self))
        self._take()
        self._waiting_for = None
        if self._ended:
            raise CancelledError
        return future.result()

    def together(self, value: T, work: Callable[[list[T]], Sequence[R]]) -> R:
        """What `work` makes of `value`; the values of other lanes that are ready to compute now come with it.

        Args:
            work: values to results, in order, none of them None. The same for all lanes.
        """
        share = self._baton.share(value)
        if self._random is not None:
            self._random.take()
        if self._baton.step_aside(self):
            self._take()
        if not share.done:
            self._baton.compute(work)
        if share.error is not None:
            raise share.error
        result: R = share.result
        return result

    def end(self) -> None:
        """Called by another thread: the lane shall wait for nothing any more, now or later."""
        self._ended = True
        future = self._waiting_for
        if future is not None:
            future.cancel()

    def go(self) -> None:
        """Called by the baton: it is this turn's."""
        self._may_go.release()

    def _take(self) -> None:
        self._may_go.acquire()
        if self._random is not None:
            self._random.put()

    def _give(self) -> None:
        if self._random is not None:
            self._random.take()
        self._baton.hand_on()


class _Current(threading.local):
    turn: ComputeTicket | None = None


_current = _Current()


def current_ticket() -> ComputeTicket | None:
    """The turn that this thread is in, if it runs a lane."""
    return _current.turn
