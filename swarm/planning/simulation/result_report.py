"""What a simulation found, for people (text) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarm.errors import format_blocks
from swarm.planning.simulation.result_statistics import Outage, SimulationStatistics
from swarm.planning.simulation.runner import SimulationResult

MAX_OUTAGES = 8
"""Outages that the text lists one by one."""


def text(outcome: SimulationResult, found: SimulationStatistics) -> str:
    """A few lines for a person."""
    return "\n".join(_lines(outcome, found))


def _lines(outcome: SimulationResult, found: SimulationStatistics) -> Iterator[str]:
    scenario = outcome.scenario
    yield scenario.description
    last = outcome.samples[-1] if outcome.samples else None
    there = f", {last.servers} there at the end" if last else ""
    yield (
        f"Servers: {outcome.joined} joined, {outcome.left} left{there}; {scenario.blocks} blocks, "
        f"{clock(scenario.duration)} simulated, seed {outcome.seed}"
    )
    since = f"from {clock(scenario.steady_from)} on"
    yield f"Throughput: {found.steady:.3f} of the optimum {since} (median; lowest {found.steady_lowest:.3f})"
    if last:
        yield f"  at the end the weakest block does {last.bottleneck:.4g} of at most {last.optimum:.4g} tokens/s"
    if found.near_liars is not None:
        yield f"  the blocks that liars hold truly do {found.near_liars:.3f} of the optimum (median of the weakest)"
    yield (
        f"Moves: {found.moves} in all; {found.steady_moves} {since}, "
        f"{found.moves_per_server_hour:.3f} a server and hour"
    )
    yield from _outage_lines(found.outages, scenario.update_period)
    if found.routes:
        yield (
            f"Clients: {found.routes} routes planned, {found.hops:.0f} hops and {found.seconds * 1000:.0f} ms a token "
            f"(medians); {found.outdated} led through a server that was gone, {found.unroutable} found no way"
        )


def _outage_lines(outages: tuple[Outage, ...], period: float) -> Iterator[str]:
    if not outages:
        yield "Outages: none, once all blocks were held"
        return
    yield f"Outages: {len(outages)}, when nobody served some block"
    for outage in outages[:MAX_OUTAGES]:
        line = f"  blocks {format_blocks(outage.blocks)} from {clock(outage.began)} on"
        if outage.decided is not None:
            line += f", first server decided after {outage.decided - outage.began:.1f} s"
        if outage.ended is None:
            yield f"{line}, still open at the end"
        else:
            seconds = outage.ended - outage.began
            yield f"{line}, closed after {seconds:.1f} s ({seconds / period:.2f} update periods)"
    if len(outages) > MAX_OUTAGES:
        yield f"  and {len(outages) - MAX_OUTAGES} more"


def to_json(outcome: SimulationResult, found: SimulationStatistics) -> bytes:
    """The figures, and everything that they were made from."""
    return msgspec.json.format(msgspec.json.encode({"figures": found, "outcome": outcome}), indent=1)


def clock(seconds: float) -> str:
    """A time of the simulation as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
