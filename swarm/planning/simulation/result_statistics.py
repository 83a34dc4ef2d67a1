"""Computes the statistics of a simulation's result."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from swarm.planning.simulation.ground_truth import CoverageGap
from swarm.planning.simulation.runner import SimulationResult, SwarmSample


@dataclass(frozen=True)
class Outage:
    """Coverage gaps that overlap in time: from the loss of the first block to the return of the last one.

    Attributes:
        blocks: the blocks concerned, ascending.
        began, ended: seconds; `ended` is None if some of the gaps are still open.
        decided: when the first server decided to move to close a gap; None if no server did.
    """

    blocks: tuple[int, ...]
    began: float
    ended: float | None
    decided: float | None


@dataclass(frozen=True)
class SimulationStatistics:
    """Statistics of one simulation. The steady state begins at the scenario's `steady_from`.

    Attributes:
        steady: median, over the steady state, of the bottleneck throughput as a fraction of the optimum.
        steady_lowest: its minimum over the steady state.
        near_liars: median, over the steady state, of the throughput of the liars' blocks as a fraction of the optimum.
        moves: number of all moves.
        steady_moves: number of moves in the steady state.
        moves_per_server_hour: rate of moves in the steady state.
        outages: in the order in which they began.
        hops: median number of hops of the routes that clients planned.
        seconds: median expected time of a token on these routes.
        routes: number of routes that clients tried to plan.
        unroutable: number of attempts in which no server announced some block.
        outdated: number of routes that included a server that was gone.
    """

    steady: float
    steady_lowest: float
    near_liars: float | None
    moves: int
    steady_moves: int
    moves_per_server_hour: float
    outages: tuple[Outage, ...]
    hops: float
    seconds: float
    routes: int
    unroutable: int
    outdated: int


def compute_statistics(result: SimulationResult) -> SimulationStatistics:
    """Compute the statistics of a result."""
    scenario = result.scenario
    steady = [sample for sample in result.samples if sample.time >= scenario.steady_from] or list(result.samples[-1:])
    shares = [_share_of_optimum(sample, sample.bottleneck) for sample in steady] or [0.0]
    near_liars = [_share_of_optimum(sample, sample.near_liars) for sample in steady if sample.near_liars is not None]
    server_hours = sum(sample.servers for sample in steady) * scenario.sample_every / 3600
    steady_moves = sum(move.time >= scenario.steady_from for move in result.moves)
    found = [route for route in result.routes if route.hops]
    return SimulationStatistics(
        steady=statistics.median(shares),
        steady_lowest=min(shares),
        near_liars=statistics.median(near_liars) if near_liars else None,
        moves=len(result.moves),
        steady_moves=steady_moves,
        moves_per_server_hour=steady_moves / server_hours if server_hours else 0.0,
        outages=_find_outages(result),
        hops=statistics.median(route.hops for route in found) if found else 0.0,
        seconds=statistics.median(route.seconds for route in found) if found else 0.0,
        routes=len(result.routes),
        unroutable=len(result.routes) - len(found),
        outdated=sum(route.lost > 0 for route in found),
    )


def _share_of_optimum(sample: SwarmSample, throughput: float) -> float:
    return throughput / sample.optimum if sample.optimum else 0.0


def _find_outages(result: SimulationResult) -> tuple[Outage, ...]:
    groups: list[list[CoverageGap]] = []
    until = -1.0
    for gap in result.gaps:
        if gap.began > until:
            groups.append([])
        groups[-1].append(gap)
        until = max(until, float("inf") if gap.ended is None else gap.ended)
    return tuple(_build_outage(group, result) for group in groups)


def _build_outage(gaps: list[CoverageGap], result: SimulationResult) -> Outage:
    began = gaps[0].began
    ends = [gap.ended for gap in gaps if gap.ended is not None]
    ended = max(ends) if len(ends) == len(gaps) else None
    last = result.scenario.duration if ended is None else ended
    decided = (move.time for move in result.moves if move.closes_gap and began <= move.time <= last)
    return Outage(tuple(sorted({gap.block for gap in gaps})), began, ended, next(decided, None))
