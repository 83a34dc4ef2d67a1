"""What a benchmark reports: figures by round, how certain they are, and how busy others kept the machine.

    with Report(arguments) as report:  # arguments of a parser that `report_parser` made
        for _ in report.rounds("3 servers"):
            report.add("ms a token", 1e3 * seconds, better="less")
            report.add("of the local speed", ratio, better="more", decides=True)

A row is measured at least `--repeats` times, and then until the median of what decides it is known within a tenth, or
the row has taken `--patience` seconds. The two sides of a ratio belong into one round. At the end, the tables are
printed, and written to `--json` for `scripts/compare_benchmarks.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.common import machine
from benchmarks.common.tables import show, spread, table
from swarm.common.machine import ProcessorUse

CONFIDENCE = 0.9
"""With which the true median lies in an interval."""

NARROW = 0.1
"""Width of an interval, relative to the median, at which a figure is certain."""

LOOP = 200_000
"""Additions of a loop in Python, which shows how fast the machine is at the moment."""

Better = Literal["more", "less", ""]


@dataclass
class Figure:
    """What was measured of one thing.

    Attributes:
        where: the row of a table.
        name: its column, with the unit.
        better: whether more or less of it is better, if that can be said.
        decides: whether rounds are repeated until it is certain.
        values: by round.
    """

    where: str
    name: str
    better: Better = ""
    decides: bool = False
    values: list[float] = field(default_factory=list)

    @property
    def is_certain(self) -> bool:
        low, high = interval(self.values)
        return confidence(len(self.values), 0) >= CONFIDENCE and high - low <= NARROW * abs(
            statistics.median(self.values)
        )


def confidence(count: int, cut: int) -> float:
    """With which the median lies between the values of so many rounds, of which `cut` are left out at both ends.

    A value is below the true median as often as above it, so it is outside as often as few coins of `count` show heads.
    """
    return 1 - 2 * sum(math.comb(count, heads) for heads in range(cut + 1)) / 2**count


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies with `CONFIDENCE`, whatever the distribution; of few values, their range."""
    ranked, cut = sorted(values), 0
    while 2 * (cut + 1) < len(ranked) and confidence(len(ranked), cut + 1) >= CONFIDENCE:
        cut += 1
    return ranked[cut], ranked[-1 - cut]


def report_parser(doc: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    Args:
        doc: of the benchmark's module; the first line says what it measures.
        repeats: rounds of each row, at least.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of each row, at least (%(default)s)")
    parser.add_argument("--patience", type=float, default=60, help="seconds in which a row is repeated (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


class Report:
    """The figures of one run of a benchmark. A context manager: its end prints and writes them, unless it failed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.figures: list[Figure] = []
        self._repeats, self._patience, self._json = arguments.repeats, arguments.patience, arguments.json
        self._where = ""
        self._deciding: list[Figure] = []
        self._use = _UseByOthers()
        self._others: list[float] = []
        self._loops = [_loop_ms()]

    def rounds(self, where: str = "") -> Iterator[int]:
        """The numbers of the rounds of one row, until what was added in them is certain or patience is at an end."""
        began, number = time.monotonic(), 0
        self._where, self._deciding = where, []
        while number < self._repeats or not (self._is_certain() or time.monotonic() - began > self._patience):
            yield number
            number += 1
            self._note_machine()
            if sys.stderr.isatty():
                print(f"\r{where}: round {number}, {time.monotonic() - began:.0f} s", end="\033[K", file=sys.stderr)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)

    def add(
        self, name: str, value: float, better: Better = "", decides: bool = False, where: str | None = None
    ) -> None:
        """A figure of the round.

        Args:
            where: its row, if that is not the round's.
        """
        where = self._where if where is None else where
        for figure in self.figures:
            if (figure.where, figure.name) == (where, name):
                break
        else:
            figure = Figure(where, name, better, decides)
            self.figures.append(figure)
            if decides:
                self._deciding.append(figure)
        figure.values.append(value)

    def note(self, text: str) -> None:
        """Print something above the tables, now."""
        print(text, flush=True)

    def _is_certain(self) -> bool:
        return all(figure.is_certain for figure in self._deciding)

    def _note_machine(self) -> None:
        self._others.append(self._use.others())
        self._use = _UseByOthers()
        self._loops.append(_loop_ms())

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._note_machine()
        print("\n".join([*self._tables(), *self._doubts()]), flush=True)
        if self._json:
            self._json.write_text(json.dumps(self._as_json(), indent=1) + "\n")

    def _tables(self) -> Iterator[str]:
        rows: dict[str, dict[str, str]] = {}
        for figure in self.figures:
            rows.setdefault(figure.where, {})[figure.name] = spread(figure.values)
        by_columns: dict[tuple[str, ...], list[list[str]]] = {}
        for where, cells in rows.items():
            by_columns.setdefault(tuple(cells), []).append([where, *cells.values()])
        for columns, lines in by_columns.items():
            yield table(["median (range)", *columns], lines)
            yield ""

    def _doubts(self) -> Iterator[str]:
        """How far the figures can be trusted."""
        yield ", ".join(f"{name} {value}" for name, value in machine.describe().items())
        yield f"other programs and machines used {100 * statistics.median(self._others):.0f} % of the processors"
        yield f"{LOOP:,} additions in Python took {spread(self._loops)} ms"
        for figure in self.figures:
            if figure.decides and not figure.is_certain:
                low, high = map(show, interval(figure.values))
                rounds = len(figure.values)
                yield f"NOT CERTAIN after {rounds} rounds: {figure.where}, {figure.name}: between {low} and {high}"

    def _as_json(self) -> dict[str, Any]:
        return {
            "benchmark": " ".join([_module(), *_without_json(sys.argv[1:])]),
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "others": self._others,
            "loop_ms": self._loops,
            "figures": [asdict(figure) for figure in self.figures],
        }


class _UseByOthers(ProcessorUse):
    """What is not this process, nor what it has started."""

    def _own_seconds(self) -> float:
        own = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own += times.user + times.system + times.children_user + times.children_system
        return own


def _loop_ms() -> float:
    began, total = time.thread_time(), 0
    for number in range(LOOP):
        total += number
    return 1e3 * (time.thread_time() - began)


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def _without_json(arguments: Sequence[str]) -> list[str]:
    rest = list(arguments)
    if "--json" in rest:
        at = rest.index("--json")
        del rest[at : at + 2]
    return rest
