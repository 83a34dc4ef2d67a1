"""Running the lanes of one `generate`: a thread, a session and a random state for each, one baton for all."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from swarm.client.lanes.lane_count import LaneCount, choose_lane_count, split_sequences, validate_lane_count
from swarm.client.lanes.merge_outputs import merge_outputs
from swarm.client.lanes.split_arguments import batch_size, lane_arguments, plan_lanes
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket, RandomState
from swarm.errors import CacheFull

T = TypeVar("T")

GenerateFunction = Callable[[dict[str, Any], ComputeTicket | None], Any]
"""Runs transformers' `generate` with such arguments, inside the turn if there is one."""


def generate_in_lanes(model: Any, wanted: LaneCount, arguments: Mapping[str, Any], generate: GenerateFunction) -> Any:
    """One `generate`, its rows divided among lanes.

    Args:
        model: the distributed model.
        arguments: of transformers' `generate`, by name.

    The lanes' random states come from the caller's generator, which goes on by one draw.

    Raises:
        UsageError: the arguments cannot be divided; see `lane_arguments`.
        CacheFull: the servers have no room for so many lanes.
    """
    validate_lane_count(wanted)
    rows = batch_size(arguments)
    lanes = 1 if rows == 1 else choose_lane_count(wanted, rows, model.swarm.stages() if wanted == "auto" else 1)
    if lanes == 1:
        return generate(dict(arguments), None)
    made = plan_lanes(model, arguments)
    parts = split_sequences(rows, lanes)
    seeds = torch.randint(2**62, (lanes,), device=model.device).tolist()
    randoms = [RandomState(model.device, seed) for seed in seeds]
    callers = RandomState(model.device)
    try:
        return merge_outputs(
            run_lanes([partial(generate, lane_arguments(arguments, made, part)) for part in parts], randoms),
            parts,
            made,
        )
    except CacheFull as error:
        raise explain_cache_full(error, lanes) from error
    finally:
        callers.put()


def explain_cache_full(error: CacheFull, lanes: int) -> CacheFull:
    """The servers' refusal, with what to do about it."""
    return CacheFull(f"{error} ({lanes} lanes are open at every server at once; fewer lanes or rows need less)")


def run_lanes(works: Sequence[Callable[[ComputeTicket], T]], randoms: Sequence[RandomState]) -> list[T]:
    """What each of `works` returns; each runs in a thread of its own and computes inside the turn that it is given.

    The first error ends the other lanes, at their next wait at the latest, and is raised when all have ended. So does
    an interruption of the calling thread.
    """
    baton = ComputeLock()
    ended: queue.SimpleQueue[_LaneThread[T]] = queue.SimpleQueue()
    lanes = [
        _LaneThread(work, ComputeTicket(baton, random), ended) for work, random in zip(works, randoms, strict=True)
    ]
    started: list[_LaneThread[T]] = []
    try:
        for lane in lanes:
            lane.thread.start()
            started.append(lane)
        for _ in lanes:
            if (error := ended.get().error) is not None:
                raise error
    except BaseException:
        for lane in started:
            lane.turn.end()
        raise
    finally:
        for lane in started:
            lane.thread.join()
    return [lane.results[0] for lane in lanes]


class _LaneThread(Generic[T]):
    """One lane's thread. When it ends, it puts itself into `ended`.

    Attributes:
        results: what the work returned, if it did.
        error: what it raised, if it did.
    """

    def __init__(
        self, work: Callable[[ComputeTicket], T], turn: ComputeTicket, ended: queue.SimpleQueue[_LaneThread[T]]
    ) -> None:
        self.turn = turn
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._work = work
        self._ended = ended
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._run,), name="swarm-lane", daemon=True)

    def _run(self) -> None:
        try:
            self.results.append(self._work(self.turn))
        except BaseException as error:
            self.error = error
        finally:
            self._ended.put(self)
