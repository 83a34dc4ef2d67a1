"""Runs a scenario, records samples of what happens, and says in a few lines what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.simulation.scenario import Scenario
from benchmarks.simulation.state import CompletedMove, CoverageGap
from benchmarks.simulation.swarm import SimulatedSwarm
from swarm.errors import format_blocks

MAX_OUTAGES = 8
"""Number of outages that the text lists one by one."""


@dataclass(frozen=True)
class SwarmSample:
    """The state of the swarm at one moment. Throughputs are true ones, in tokens/s.

    Attributes:
        time: seconds.
        bottleneck: throughput of the weakest block.
        optimum: upper bound on it for any placement of these servers.
        near_liars: throughput of the weakest block that a liar holds; None if there is no liar.
        servers: number of servers that are serving or loading.
        visible: number of announced servers, including those that vanished silently.
        moves: number of moves so far.
        gaps: number of blocks without a server.
    """

    time: float
    bottleneck: float
    optimum: float
    near_liars: float | None
    servers: int
    visible: int
    moves: int
    gaps: int


@dataclass(frozen=True)
class SimulationResult:
    """Everything that a simulation recorded."""

    scenario: Scenario
    seed: int
    joined: int
    left: int
    samples: tuple[SwarmSample, ...]
    moves: tuple[CompletedMove, ...]
    gaps: tuple[CoverageGap, ...]


def simulate(scenario: Scenario, seed: int = 0) -> SimulationResult:
    """Run a scenario to its end. The same seed gives the same result."""
    world = SimulatedSwarm(scenario, seed)
    samples: list[SwarmSample] = []
    _call_every(world, scenario.sample_every, lambda: samples.append(_sample_swarm(world)))
    world.clock.run_until(scenario.duration)
    truth = world.truth
    return SimulationResult(
        scenario, seed, truth.joined, truth.left, tuple(samples), tuple(truth.moves), truth.all_gaps()
    )


def _call_every(world: SimulatedSwarm, every: float, action: Callable[[], None]) -> None:
    def happen() -> None:
        action()
        world.clock.call_after(every, happen)

    world.clock.call_after(every, happen)


def _sample_swarm(world: SimulatedSwarm) -> SwarmSample:
    truth = world.truth
    world.directory.advance(world.clock.now)
    near_liars = truth.near_liars()
    return SwarmSample(
        time=world.clock.now,
        bottleneck=float(truth.throughputs().min()),
        optimum=truth.optimum,
        near_liars=float(near_liars.min()) if near_liars.size else None,
        servers=truth.servers,
        visible=world.directory.visible,
        moves=len(truth.moves),
        gaps=truth.gaps_now,
    )


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
    """

    steady: float
    steady_lowest: float
    near_liars: float | None
    moves: int
    steady_moves: int
    moves_per_server_hour: float
    outages: tuple[Outage, ...]


def compute_statistics(result: SimulationResult) -> SimulationStatistics:
    """Compute the statistics of a result."""
    scenario = result.scenario
    steady = [sample for sample in result.samples if sample.time >= scenario.steady_from] or list(result.samples[-1:])
    shares = [_share_of_optimum(sample, sample.bottleneck) for sample in steady] or [0.0]
    near_liars = [_share_of_optimum(sample, sample.near_liars) for sample in steady if sample.near_liars is not None]
    server_hours = sum(sample.servers for sample in steady) * scenario.sample_every / 3600
    steady_moves = sum(move.time >= scenario.steady_from for move in result.moves)
    return SimulationStatistics(
        steady=statistics.median(shares),
        steady_lowest=min(shares),
        near_liars=statistics.median(near_liars) if near_liars else None,
        moves=len(result.moves),
        steady_moves=steady_moves,
        moves_per_server_hour=steady_moves / server_hours if server_hours else 0.0,
        outages=_find_outages(result),
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


def format_result(result: SimulationResult, found: SimulationStatistics) -> str:
    """Format a result in a few lines of text."""
    return "\n".join(_result_lines(result, found))


def _result_lines(result: SimulationResult, found: SimulationStatistics) -> Iterator[str]:
    scenario = result.scenario
    yield scenario.description
    last = result.samples[-1] if result.samples else None
    remaining = f", {last.servers} present at the end" if last else ""
    yield (
        f"Servers: {result.joined} joined, {result.left} left{remaining}; {scenario.blocks} blocks, "
        f"{format_time(scenario.duration)} simulated, seed {result.seed}"
    )
    since = f"from {format_time(scenario.steady_from)} on"
    yield f"Throughput: {found.steady:.3f} of the optimum {since} (median; lowest {found.steady_lowest:.3f})"
    if last:
        yield f"  at the end the weakest block has {last.bottleneck:.4g} of at most {last.optimum:.4g} tokens/s"
    if found.near_liars is not None:
        yield f"  the blocks that liars hold really have {found.near_liars:.3f} of the optimum (median of the weakest)"
    yield (
        f"Moves: {found.moves} in all; {found.steady_moves} {since}, "
        f"{found.moves_per_server_hour:.3f} per server and hour"
    )
    yield from _outage_lines(found.outages, scenario.update_period)


def _outage_lines(outages: tuple[Outage, ...], period: float) -> Iterator[str]:
    if not outages:
        yield "Outages: none, once all blocks were served"
        return
    yield f"Outages: {len(outages)}, periods in which some block had no server"
    for outage in outages[:MAX_OUTAGES]:
        line = f"  blocks {format_blocks(outage.blocks)} from {format_time(outage.began)} on"
        if outage.decided is not None:
            line += f", first server decided after {outage.decided - outage.began:.1f} s"
        if outage.ended is None:
            yield f"{line}, still open at the end"
        else:
            seconds = outage.ended - outage.began
            yield f"{line}, closed after {seconds:.1f} s ({seconds / period:.2f} update periods)"
    if len(outages) > MAX_OUTAGES:
        yield f"  and {len(outages) - MAX_OUTAGES} more"


def format_time(seconds: float) -> str:
    """Format a time of the simulation as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
