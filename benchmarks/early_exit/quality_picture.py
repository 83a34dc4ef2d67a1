"""A picture of what early exit costs and saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.early_exit.quality import Row

COLORS = {"softmax": "#2f6fdf", "similarity": "#d9822b", "classifier": "#3a9d5d"}
LINES = {"exact": "-", "project": "--"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw agreement and perplexity against the share of blocks that is skipped, by confidence and fill."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    agreement, perplexity = figure.subplots(1, 2)
    for kind, color in COLORS.items():
        for fill, line in LINES.items():
            chosen = sorted(
                (row.quality for row in rows if (row.confidence, row.fill) == (kind, fill)), key=lambda one: one.skipped
            )
            skipped = [100 * one.skipped for one in chosen]
            label = f"{kind}, {fill}"
            style = {"color": color, "linestyle": line, "marker": "o", "markersize": 3, "label": label}
            agreement.plot(skipped, [100 * one.agreement for one in chosen], **style)
            perplexity.plot(skipped, [100 * one.perplexity for one in chosen], **style)
    agreement.set_ylabel("successors that are the full model's, %", fontsize=8)
    perplexity.set_ylabel("perplexity above the full model's, %", fontsize=8)
    for axis in (agreement, perplexity):
        axis.set_xlabel("blocks skipped, %", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    agreement.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)
