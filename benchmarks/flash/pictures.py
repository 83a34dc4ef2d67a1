"""Pictures of the results of `benchmarks.flash`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ORDER = (
    "naive",
    "naive, reading ahead",
    "hybrid",
    "hybrid, reading ahead",
    "flash",
    "the same in memory",
    "dense in memory",
)
GREY, BLUE, LIGHT = "#8a8f98", "#2f6fdf", "#cfd6e4"


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw whatever was measured: seconds a token by variant, and resident memory over time."""
    folder.mkdir(parents=True, exist_ok=True)
    decoded = {name.removeprefix("decode "): value for name, value in results.items() if name.startswith("decode")}
    if decoded:
        _draw_decode(decoded, folder / "flash-token.png")
    if "memory" in results:
        _draw_memory(results["memory"], folder / "flash-memory.png")


def _draw_decode(decoded: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure = Figure(figsize=(4.2 * len(decoded), 2.6), layout="constrained")
    axes = figure.subplots(1, len(decoded), squeeze=False)
    for axis, (title, rows) in zip(axes[0], decoded.items(), strict=True):
        names = [name for name in ORDER if name in rows][::-1]
        medians = [statistics.median(rows[name]) * 1000 for name in names]
        bars = axis.barh(names, medians, color=[BLUE if name == "flash" else LIGHT for name in names])
        axis.bar_label(bars, [f"{value:.0f}" for value in medians], padding=3, fontsize=8, color=GREY)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ms a token, 32 blocks", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_memory(memory: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(memory["seconds"], [size / 1e6 for size in memory["resident"]], color=BLUE, label="resident")
    allowed = memory["before"] + memory["budget"]
    axis.axhline((allowed + 150e6) / 1e6, color=GREY, linestyle="--", label="before + budget + 150 MB")
    axis.axhline(allowed / 1e6, color=LIGHT, label="before + budget")
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"seconds, {memory['tokens']} tokens", fontsize=8)
    axis.set_ylabel("MB", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
