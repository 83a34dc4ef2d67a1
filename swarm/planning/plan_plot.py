"""Draws a plan as a chart: how long each device is busy with a token."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import UsageError
from swarm.planning.device_group import PipelinePlan

COMPUTING, SENDING, WAITING = "#2a6f97", "#e09f3e", "#e5e7eb"


def plot_plan(plan: PipelinePlan, path: Path) -> None:
    """Write a PNG with one bar per device. Raises `UsageError` without matplotlib or if `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'swarm[plot]'") from None

    labels = [f"{stage.device.name}\nblocks {stage.span}" for stage in plan.stages]
    compute = [stage.compute * 1000 for stage in plan.stages]
    send = [stage.send * 1000 for stage in plan.stages]
    slowest = plan.bottleneck_seconds * 1000
    idle = [slowest - c - s for c, s in zip(compute, send, strict=True)]

    figure = Figure(figsize=(8, 1.6 + 0.55 * len(labels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh(labels, compute, color=COMPUTING, label="computing")
    axes.barh(labels, send, left=compute, color=SENDING, label="sending")
    busy = [slowest - one for one in idle]
    axes.barh(labels, idle, left=busy, color=WAITING, label="waiting for the slowest")
    axes.invert_yaxis()
    axes.set_xlabel("ms per token, with a full pipeline")
    axes.set_title(
        f"{plan.pipeline_rate:.3g} tokens/s with {plan.sessions} or more concurrent sessions, "
        f"{plan.session_rate:.3g} in a single session",
        fontsize="medium",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
