"""Says what changed between two runs of `python -m benchmarks.all --json`, beyond noise.

    python scripts/compare_benchmarks.py BEFORE.json AFTER.json [--all]

A figure has changed if the intervals in which its medians lie do not meet (90 % each). Ratios of two sides that were
measured in turns hold on any machine; other figures are only as comparable as the machine was: the loop of each run
shows how fast it was, and the share of others how busy. Exits with 1 if something became worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.report import Figure, interval
from benchmarks.common.tables import show, table


@dataclass(frozen=True)
class Change:
    """A figure of both runs."""

    benchmark: str
    before: Figure
    after: Figure

    @property
    def verdict(self) -> str:
        """Empty for nothing but noise."""
        (low, high), (new_low, new_high) = interval(self.before.values), interval(self.after.values)
        if new_low <= high and low <= new_high:
            return ""
        if not self.after.better:
            return "other"
        return "better" if (new_low > high) == (self.after.better == "more") else "WORSE"


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    """All figures that both runs have."""
    known = {
        (report["benchmark"], figure["where"], figure["name"]): Figure(**figure)
        for report in before["reports"]
        for figure in report["figures"]
    }
    for report in after["reports"]:
        for figure in report["figures"]:
            old = known.get((report["benchmark"], figure["where"], figure["name"]))
            if old is not None:
                yield Change(report["benchmark"].removeprefix("benchmarks."), old, Figure(**figure))


def machine(run: dict[str, Any]) -> str:
    """How fast and how busy it was."""
    loops = [value for report in run["reports"] for value in report["loop_ms"]]
    others = [value for report in run["reports"] for value in report["others"]]
    about = next((report["machine"] for report in run["reports"]), {})
    low, high = show(min(loops)), show(max(loops))
    return (
        f"{run['commit']}, {run['when'][:16]}: loop {show(median(loops))} ms ({low} to {high}), others used "
        f"{100 * median(others):.0f} %; {', '.join(about.values())}"
    )


def row(change: Change) -> list[str]:
    """For the table."""
    before, after = median(change.before.values), median(change.after.values)
    sides = []
    for side in (change.before, change.after):
        low, high = map(show, interval(side.values))
        sides.append(f"{show(median(side.values))} ({low} to {high})")
    times = f"{after / before:.2f}" if before else ""
    return [change.benchmark, change.after.where, change.after.name, *sides, times, change.verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--all", action="store_true", help="also what has not changed")
    arguments = parser.parse_args()
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    found = list(changes(before, after))
    shown = [one for one in found if one.verdict or arguments.all]
    print(machine(before), machine(after), sep="\n", end="\n\n")
    if shown:
        rows = [row(one) for one in shown]
        print(table(("benchmark", "where", "figure", "before", "after", "times", ""), rows), end="\n\n")
    worse = sum(one.verdict == "WORSE" for one in found)
    changed = sum(bool(one.verdict) for one in found)
    print(f"{len(found)} figures in both, {changed} changed beyond noise, {worse} for the worse")
    raise SystemExit(bool(worse))


if __name__ == "__main__":
    main()
