"""`with model.inference_lanes(n, max_length=...) as lanes`: several sessions whose steps are in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from swarm.client.lanes.generate_in_lanes import explain_cache_full
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket
from swarm.errors import CacheFull, SessionClosed


class Lane:
    """One of several sessions: its steps run in order, at the same time as the steps of other lanes.

    Args:
        session: the lane's own session; its position may be set back between steps.
        lock: shared by the lanes.
        lanes: how many lanes there are, for the error message when the servers' caches are full.
    """

    def __init__(self, session: InferenceSession, lock: ComputeLock, lanes: int) -> None:
        self.session = session
        self._ticket = ComputeTicket(lock)
        self._lanes = lanes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="swarm-lane")
        self._closed = False

    def submit(self, hidden: torch.Tensor) -> Future[torch.Tensor]:
        """Start `session.step(hidden)` and return at once; the future gets its result or its error.

        The steps of a lane run in the order in which they were submitted.
        """
        if self._closed:
            raise SessionClosed("this lane is closed; open other ones")
        return self._worker.submit(self._step, hidden)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run `session.step(hidden)` after all steps that were submitted before."""
        return self.submit(hidden).result()

    def cancel(self) -> None:
        """Cancel the running step and those submitted after it; the lane takes no more steps."""
        self._closed = True
        self._ticket.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Free the session on all servers. A closed lane cannot be used again."""
        self.cancel()
        self._worker.shutdown()
        self.session.close()

    def _step(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            with self._ticket:
                return self.session.step(hidden)
        except CacheFull as error:
            raise explain_cache_full(error, self._lanes) from error


class InferenceLanes(tuple[Lane, ...]):
    """The lanes of one model; a context manager that closes them all.

    Lanes are independent: an error of one lane, or a server that it loses, does not affect the others.
    """

    def __new__(cls, sessions: Sequence[InferenceSession]) -> InferenceLanes:
        lock = ComputeLock()
        return super().__new__(cls, (Lane(session, lock, len(sessions)) for session in sessions))

    def close(self) -> None:
        """Close all sessions. Running steps are cancelled."""
        for lane in self:
            lane.cancel()
        for lane in self:
            lane.close()

    def __enter__(self) -> InferenceLanes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
