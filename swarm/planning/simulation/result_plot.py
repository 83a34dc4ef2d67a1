"""A picture of a simulation: throughput against the optimum, moves, gaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.errors import UsageError
from swarm.planning.simulation.runner import SimulationResult

REAL, OPTIMUM, LIAR, MOVED, GAP, SERVERS = "#2a6f97", "#9ca3af", "#b5179e", "#2a9d8f", "#d62828", "#6b7280"
BARS = 120
"""Time slots that moves are counted in."""


def draw(outcome: SimulationResult, path: Path) -> None:
    """Write a PNG, 1200 pixels wide. Raises `UsageError` without matplotlib or where `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'swarm[plot]'") from None

    scenario = outcome.scenario
    unit, name = (60.0, "minutes") if scenario.duration <= 3 * 3600 else (3600.0, "hours")
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, moves, gaps = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.6, 1.4])
    _draw_throughput(throughput, outcome, unit)
    _draw_moves(moves, outcome, unit)
    _draw_gaps(gaps, outcome, unit)
    gaps.set_xlabel(f"{name} since the beginning")
    gaps.set_xlim(0, scenario.duration / unit)
    for axes in (throughput, moves, gaps):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(scenario.description, wrap=True)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def _times(outcome: SimulationResult, unit: float) -> list[float]:
    return [sample.time / unit for sample in outcome.samples]


def _draw_throughput(axes: Any, outcome: SimulationResult, unit: float) -> None:
    times = _times(outcome, unit)
    axes.set_title("True throughput of the weakest block", loc="left")
    axes.set_ylabel("tokens/s")
    axes.plot(times, [s.optimum for s in outcome.samples], color=OPTIMUM, linestyle="--", label="optimum (upper bound)")
    axes.plot(times, [s.bottleneck for s in outcome.samples], color=REAL, label="weakest block")
    if any(sample.near_liars is not None for sample in outcome.samples):
        values = [float("nan") if s.near_liars is None else s.near_liars for s in outcome.samples]
        axes.plot(times, values, color=LIAR, linewidth=1, label="weakest block of the liars")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _draw_moves(axes: Any, outcome: SimulationResult, unit: float) -> None:
    duration = outcome.scenario.duration
    axes.set_title(f"Moves to other blocks: {len(outcome.moves)} in all", loc="left")
    axes.set_ylabel(f"moves in {duration / BARS:.0f} s")
    times = [move.time / unit for move in outcome.moves]
    axes.hist(times, bins=BARS, range=(0, duration / unit), color=MOVED, label="moves")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    servers = axes.twinx()
    servers.plot(_times(outcome, unit), [s.servers for s in outcome.samples], color=SERVERS, label="servers there")
    visible = [s.visible for s in outcome.samples]
    servers.plot(_times(outcome, unit), visible, color=SERVERS, linestyle=":", label="servers announced")
    servers.set_ylim(0, servers.get_ylim()[1] * 1.3)
    servers.set_ylabel("servers")
    servers.spines["top"].set_visible(False)
    _common_legend(axes, (axes, servers))


def _common_legend(axes: Any, sources: Sequence[Any]) -> None:
    pairs = [pair for source in sources for pair in zip(*source.get_legend_handles_labels(), strict=True)]
    axes.legend([handle for handle, _ in pairs], [label for _, label in pairs], loc="upper right", ncols=len(pairs))


def _draw_gaps(axes: Any, outcome: SimulationResult, unit: float) -> None:
    axes.set_title("Blocks that nobody serves", loc="left")
    axes.set_ylabel("block")
    axes.set_ylim(-0.5, outcome.scenario.blocks - 0.5)
    end = outcome.scenario.duration
    shortest = end / 1000  # a gap of seconds has to be seen on an axis of hours
    for gap in outcome.gaps:
        width = max((end if gap.ended is None else gap.ended) - gap.began, shortest)
        axes.broken_barh([(gap.began / unit, width / unit)], (gap.block - 0.5, 1.0), facecolors=GAP)
    if not outcome.gaps:
        axes.text(0.5, 0.5, "none, once all blocks were held", transform=axes.transAxes, ha="center", color=SERVERS)
