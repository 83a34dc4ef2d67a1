"""What a simulation found, in a few figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from swarm.planning.simulation.ground_truth import CoverageGap
from swarm.planning.simulation.runner import SimulationResult, SwarmSample


@dataclass(frozen=True)
class Outage:
    """Gaps that overlap in time: from the first block's loss to the return of the last.

    Attributes:
        blocks: that were gaps, ascending.
        began, ended: seconds; `ended` is None if some of them still are.
        decided: when the first server decided to close one; None if joining servers did, or nobody.
    """

    blocks: tuple[int, ...]
    began: float
    ended: float | None
    decided: float | None


@dataclass(frozen=True)
class SimulationStatistics:
    """Attributes:
    steady: median, over the steady state, of the bottleneck throughput as a part of the optimum.
    steady_lowest: the least of it there.
    near_liars: median, over the steady state, of the throughput of the liars' blocks as a part of the optimum.
    moves: made in all.
    steady_moves: made in the steady state.
    moves_per_server_hour: in the steady state.
    outages: in the order in which they began.
    hops: median of the routes that clients planned.
    seconds: median that a token was expected to take on them.
    routes: how many were looked for.
    unroutable: how many of these found some block announced by nobody.
    outdated: how many led through a server that was gone.
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


def figures(outcome: SimulationResult) -> SimulationStatistics:
    """Sum up an outcome."""
    scenario = outcome.scenario
    steady = [sample for sample in outcome.samples if sample.time >= scenario.steady_from] or list(outcome.samples[-1:])
    parts = [_part(sample, sample.bottleneck) for sample in steady] or [0.0]
    near_liars = [_part(sample, sample.near_liars) for sample in steady if sample.near_liars is not None]
    server_hours = sum(sample.servers for sample in steady) * scenario.sample_every / 3600
    steady_moves = sum(move.time >= scenario.steady_from for move in outcome.moves)
    found = [route for route in outcome.routes if route.hops]
    return SimulationStatistics(
        steady=statistics.median(parts),
        steady_lowest=min(parts),
        near_liars=statistics.median(near_liars) if near_liars else None,
        moves=len(outcome.moves),
        steady_moves=steady_moves,
        moves_per_server_hour=steady_moves / server_hours if server_hours else 0.0,
        outages=_outages(outcome),
        hops=statistics.median(route.hops for route in found) if found else 0.0,
        seconds=statistics.median(route.seconds for route in found) if found else 0.0,
        routes=len(outcome.routes),
        unroutable=len(outcome.routes) - len(found),
        outdated=sum(route.lost > 0 for route in found),
    )


def _part(sample: SwarmSample, throughput: float) -> float:
    return throughput / sample.optimum if sample.optimum else 0.0


def _outages(outcome: SimulationResult) -> tuple[Outage, ...]:
    groups: list[list[CoverageGap]] = []
    until = -1.0
    for gap in outcome.gaps:
        if gap.began > until:
            groups.append([])
        groups[-1].append(gap)
        until = max(until, float("inf") if gap.ended is None else gap.ended)
    return tuple(_outage(group, outcome) for group in groups)


def _outage(gaps: list[CoverageGap], outcome: SimulationResult) -> Outage:
    began = gaps[0].began
    ends = [gap.ended for gap in gaps if gap.ended is not None]
    ended = max(ends) if len(ends) == len(gaps) else None
    last = outcome.scenario.duration if ended is None else ended
    decided = (move.time for move in outcome.moves if move.closes_gap and began <= move.time <= last)
    return Outage(tuple(sorted({gap.block for gap in gaps})), began, ended, next(decided, None))
