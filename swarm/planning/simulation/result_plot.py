"""Draws a simulation's result as a chart: throughput relative to the optimum, moves, gaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.errors import UsageError
from swarm.planning.simulation.runner import SimulationResult

REAL, OPTIMUM, LIAR, MOVED, GAP, SERVERS = "#2a6f97", "#9ca3af", "#b5179e", "#2a9d8f", "#d62828", "#6b7280"
HISTOGRAM_BINS = 120
"""Number of time slots in which moves are counted."""


def plot_result(result: SimulationResult, path: Path) -> None:
    """Write a PNG, 1200 pixels wide. Raises `UsageError` without matplotlib or if `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'swarm[plot]'") from None

    scenario = result.scenario
    unit, name = (60.0, "minutes") if scenario.duration <= 3 * 3600 else (3600.0, "hours")
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, moves, gaps = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.6, 1.4])
    _plot_throughput(throughput, result, unit)
    _plot_moves(moves, result, unit)
    _plot_gaps(gaps, result, unit)
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


def _times(result: SimulationResult, unit: float) -> list[float]:
    return [sample.time / unit for sample in result.samples]


def _plot_throughput(axes: Any, result: SimulationResult, unit: float) -> None:
    times = _times(result, unit)
    axes.set_title("True throughput of the weakest block", loc="left")
    axes.set_ylabel("tokens/s")
    axes.plot(times, [s.optimum for s in result.samples], color=OPTIMUM, linestyle="--", label="optimum (upper bound)")
    axes.plot(times, [s.bottleneck for s in result.samples], color=REAL, label="weakest block")
    if any(sample.near_liars is not None for sample in result.samples):
        values = [float("nan") if s.near_liars is None else s.near_liars for s in result.samples]
        axes.plot(times, values, color=LIAR, linewidth=1, label="weakest block of the liars")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _plot_moves(axes: Any, result: SimulationResult, unit: float) -> None:
    duration = result.scenario.duration
    axes.set_title(f"Moves to other blocks: {len(result.moves)} in all", loc="left")
    axes.set_ylabel(f"moves in {duration / HISTOGRAM_BINS:.0f} s")
    times = [move.time / unit for move in result.moves]
    axes.hist(times, bins=HISTOGRAM_BINS, range=(0, duration / unit), color=MOVED, label="moves")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # space for the legend
    servers = axes.twinx()
    servers.plot(_times(result, unit), [s.servers for s in result.samples], color=SERVERS, label="servers present")
    visible = [s.visible for s in result.samples]
    servers.plot(_times(result, unit), visible, color=SERVERS, linestyle=":", label="servers announced")
    servers.set_ylim(0, servers.get_ylim()[1] * 1.3)
    servers.set_ylabel("servers")
    servers.spines["top"].set_visible(False)
    _common_legend(axes, (axes, servers))


def _common_legend(axes: Any, sources: Sequence[Any]) -> None:
    pairs = [pair for source in sources for pair in zip(*source.get_legend_handles_labels(), strict=True)]
    axes.legend([handle for handle, _ in pairs], [label for _, label in pairs], loc="upper right", ncols=len(pairs))


def _plot_gaps(axes: Any, result: SimulationResult, unit: float) -> None:
    axes.set_title("Blocks without a server", loc="left")
    axes.set_ylabel("block")
    axes.set_ylim(-0.5, result.scenario.blocks - 0.5)
    end = result.scenario.duration
    shortest = end / 1000  # a gap of seconds must be visible on an axis of hours
    for gap in result.gaps:
        width = max((end if gap.ended is None else gap.ended) - gap.began, shortest)
        axes.broken_barh([(gap.began / unit, width / unit)], (gap.block - 0.5, 1.0), facecolors=GAP)
    if not result.gaps:
        axes.text(0.5, 0.5, "none, once all blocks were served", transform=axes.transAxes, ha="center", color=SERVERS)
