"""`with model.inference_lanes(n, max_length=...) as lanes`: sessions that a loop keeps in flight at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import overload

import torch

from swarm.client.lanes.lane_threads import explain_cache_full
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket
from swarm.errors import CacheFull, SessionClosed


class Lane:
    """One session among several; its steps are computed one after the other, at the same time as other lanes' steps.

    Args:
        session: its own, with its own caches at every server; its position may be set back between steps.
        baton: what the lanes share.
        lanes: how many there are, for what is said when there is no room.
    """

    def __init__(self, session: InferenceSession, baton: ComputeLock, lanes: int) -> None:
        self.session = session
        self._turn = ComputeTicket(baton)
        self._lanes = lanes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="swarm-lane")
        self._closed = False

    def submit(self, hidden: torch.Tensor) -> Future[torch.Tensor]:
        """Begin `session.step(hidden)` and come back at once; its result or its error is in the future.

        Steps of a lane are done in the order in which they were submitted.
        """
        if self._closed:
            raise SessionClosed("this lane is closed; open other ones")
        return self._worker.submit(self._step, hidden)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """`session.step(hidden)`, after the steps that were submitted before."""
        return self.submit(hidden).result()

    def end(self) -> None:
        """Give up the running step and those behind it."""
        self._closed = True
        self._turn.end()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Free the session on all servers. A closed lane cannot be used again."""
        self.end()
        self._worker.shutdown()
        self.session.close()

    def _step(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            with self._turn:
                return self.session.step(hidden)
        except CacheFull as error:
            raise explain_cache_full(error, self._lanes) from error


class InferenceLanes(Sequence[Lane]):
    """Lanes of one model; a context manager that closes them all.

    What one lane computes, and a server that it loses, is no matter of the others.
    """

    def __init__(self, sessions: Sequence[InferenceSession]) -> None:
        baton = ComputeLock()
        self._lanes = [Lane(session, baton, len(sessions)) for session in sessions]

    @overload
    def __getitem__(self, index: int) -> Lane: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Lane]: ...

    def __getitem__(self, index: int | slice) -> Lane | Sequence[Lane]:
        return self._lanes[index]

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def close(self) -> None:
        """Free all sessions. Steps that are under way are given up."""
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.close()

    def __enter__(self) -> InferenceLanes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
