"""What the command finds out: one record a case, written down as soon as it is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Value = float | int | str
Status = Literal["ok", "missed", "wrong", "failed", "no memory", "died", "skipped"]
"""What became of a case.

ok: it ran, and what it computed is right.
missed: it ran, but not as fast as its goal says.
wrong: it computed something else than the reference.
failed, no memory: it raised an error.
died: it ended its process, or did not end in time.
skipped: it was not begun, or this machine cannot do it; the note says why.
"""

BAD: frozenset[Status] = frozenset({"wrong", "failed", "no memory", "died"})


@dataclass(frozen=True)
class Goal:
    """What a figure should be at most or at least."""

    figure: str
    limit: float
    at_least: bool = False

    def met(self, values: Mapping[str, Value]) -> bool:
        """Whether these figures meet it."""
        found = float(values[self.figure])
        return found >= self.limit if self.at_least else found <= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True)
class Measured:
    """What a case has found, if it ran to its end.

    Attributes:
        values: figures by name, with their unit in the name.
        goal: what one of them should be; None if there is none.
        note: what else has to be said, such as which way was taken and why.
    """

    values: Mapping[str, Value] = field(default_factory=dict)
    goal: Goal | None = None
    note: str = ""


@dataclass(frozen=True)
class Record:
    """One case.

    Attributes:
        step: one of the command's steps.
        case: its name, unique in the step.
        status: what became of it.
        values: figures by name.
        goal: the goal in words; "" if there is none.
        note: what went wrong, or what else has to be said.
        seconds: how long it took.
    """

    step: str
    case: str
    status: Status
    values: dict[str, Value] = field(default_factory=dict)
    goal: str = ""
    note: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """For the terminal."""
        figures = ", ".join(f"{name} {shown(value)}" for name, value in self.values.items())
        said = "; ".join(one for one in (figures, self.note.partition("\n")[0]) if one)
        return f"{self.status:>9}  {self.step}: {self.case} ({self.seconds:.1f} s){': ' if said else ''}{said}"


def shown(value: Value) -> str:
    """A figure with three digits, or four in front of the point."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


class Journal:
    """The file of records, one JSON object a line. Several processes append to it, one after the other.

    A line `{"begin": ...}` says that a case has begun, so that one that ends its process can be named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: str, case: str) -> None:
        """Note that a case begins."""
        self._append({"begin": case, "step": step})

    def add(self, record: Record) -> None:
        """Note what became of a case."""
        self._append(asdict(record))

    def _append(self, entry: Mapping[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def records(self, step: str | None = None) -> list[Record]:
        """What became of the cases so far, of one step or of all."""
        found = [Record(**entry) for entry in self._entries() if "begin" not in entry]
        return [one for one in found if step in (None, one.step)]

    def unfinished(self, step: str) -> str | None:
        """The case of a step that has begun last and did not end, if there is one."""
        ours = [entry for entry in self._entries() if entry["step"] == step]
        return str(ours[-1]["begin"]) if ours and "begin" in ours[-1] else None

    def _entries(self) -> Iterable[dict[str, object]]:
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # cut off, because its process was killed while it wrote
                continue
        return found
