"""The lanes of one `generate` call: a thread, a session and a random state for each, and one compute lock for all."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, TypeVar

import torch

from swarm.client.lanes.lane_count import LaneCount, choose_lane_count, split_sequences, validate_lane_count
from swarm.client.lanes.merge_outputs import merge_outputs
from swarm.client.lanes.split_arguments import batch_size, lane_arguments, plan_lanes
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket, RandomState
from swarm.errors import CacheFull

T = TypeVar("T")

GenerateFunction = Callable[[dict[str, Any], ComputeTicket | None], Any]
"""Runs transformers' `generate` with these arguments, inside the ticket if there is one."""


def generate_in_lanes(model: Any, lanes: LaneCount, arguments: Mapping[str, Any], generate: GenerateFunction) -> Any:
    """Run one `generate` call with its sequences divided among lanes.

    The random states of the lanes derive from the caller's generator, which advances by one draw.

    Args:
        model: the distributed model.
        lanes: how many lanes at most.
        arguments: of transformers' `generate`, by name.
        generate: runs the part of one lane.

    Raises:
        UsageError: the arguments cannot be divided; see `lane_arguments`.
        CacheFull: the servers do not have enough free cache for so many lanes.
    """
    validate_lane_count(lanes)
    sequences = batch_size(arguments)
    count = 1
    if sequences > 1:
        count = choose_lane_count(lanes, sequences, model.swarm.stage_count() if lanes == "auto" else 1)
    if count == 1:
        return generate(dict(arguments), None)
    plan = plan_lanes(model, arguments)
    parts = split_sequences(sequences, count)
    seeds = torch.randint(2**62, (count,), device=model.device).tolist()
    randoms = [RandomState(model.device, seed) for seed in seeds]
    callers_random = RandomState(model.device)
    try:
        works = [partial(generate, lane_arguments(arguments, plan, part)) for part in parts]
        return merge_outputs(run_lanes(works, randoms), parts, plan)
    except CacheFull as error:
        raise explain_cache_full(error, count) from error
    finally:
        callers_random.restore()


def explain_cache_full(error: CacheFull, lanes: int) -> CacheFull:
    """The servers' refusal with advice on what to do."""
    return CacheFull(f"{error} ({lanes} lanes are open at every server at once; fewer lanes or rows need less)")


def run_lanes(works: Sequence[Callable[[ComputeTicket], T]], randoms: Sequence[RandomState]) -> list[T]:
    """The results of `works`; each runs in its own thread and computes inside the ticket that it gets.

    The first error, or an interruption of the calling thread, cancels all lanes at their next wait. It is raised when
    all lanes have ended.
    """
    lock = ComputeLock()
    tickets = [ComputeTicket(lock, random) for random in randoms]
    with ThreadPoolExecutor(len(works), thread_name_prefix="swarm-lane") as executor:
        try:
            futures = [
                executor.submit(contextvars.copy_context().run, work, ticket)
                for work, ticket in zip(works, tickets, strict=True)
            ]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
    return [future.result() for future in futures]
