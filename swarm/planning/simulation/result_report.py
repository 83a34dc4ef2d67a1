"""Formats a simulation's result as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarm.errors import format_blocks
from swarm.planning.simulation.result_statistics import Outage, SimulationStatistics
from swarm.planning.simulation.runner import SimulationResult

MAX_OUTAGES = 8
"""Number of outages that the text lists one by one."""


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
    if found.routes:
        yield (
            f"Clients: {found.routes} routes planned, {found.hops:.0f} hops and {found.seconds * 1000:.0f} ms per "
            f"token (medians); {found.outdated} included a server that was gone, {found.unroutable} found no route"
        )


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


def result_to_json(result: SimulationResult, found: SimulationStatistics) -> bytes:
    """Encode the statistics and the result that they were computed from as JSON."""
    return msgspec.json.format(msgspec.json.encode({"figures": found, "outcome": result}), indent=1)


def format_time(seconds: float) -> str:
    """Format a time of the simulation as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
