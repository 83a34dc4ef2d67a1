"""The report: one Markdown text and one JSON file with every record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common.tables import table
from benchmarks.gpu.bench import Step
from benchmarks.gpu.records import BAD, Record, shown

NO_GPU = (
    "**There was no GPU.** A stand-in took the place of CUDA's own calls, on this machine's processor, with small "
    "shapes. Whatever ran, ran; no figure says anything about a card, and no goal is judged."
)


def markdown(steps: Sequence[Step], records: Sequence[Record], machine: dict[str, str], seconds: float) -> str:
    """The whole report."""
    lines = ["# What ran on this card", ""]
    if machine.get("gpu") == "none":
        lines += [NO_GPU, ""]
    lines += [table(("", ""), sorted(machine.items())), "", f"Took {seconds:.0f} s. {summary(records)}", ""]
    bad = [record for record in records if record.status in BAD]
    if bad:
        lines += ["## What failed", "", table(("step", "case", "status", "note"), [_failure(one) for one in bad]), ""]
    for step in steps:
        ours = [record for record in records if record.step == step.name]
        if ours:
            lines += [f"## {step.title}", "", _step_table(ours), ""]
    return "\n".join(lines)


def summary(records: Sequence[Record]) -> str:
    """How many cases ended how."""
    counts = Counter(record.status for record in records)
    return ", ".join(f"{counts[status]} {status}" for status in sorted(counts)) or "no case ran"


def as_json(records: Sequence[Record], machine: dict[str, str], seconds: float) -> str:
    """Everything, for programs."""
    return json.dumps({"machine": machine, "seconds": seconds, "records": [asdict(one) for one in records]}, indent=2)


def _failure(record: Record) -> tuple[str, ...]:
    return record.step, record.case, record.status, _cell(record.note)


def _step_table(records: Sequence[Record]) -> str:
    """A row a case, with a column for each figure that any of them has."""
    figures = list(dict.fromkeys(name for record in records for name in record.values))
    goals = any(record.goal for record in records)
    notes = any(record.note for record in records)
    heading = ["case", "status", *figures, *(["goal"] if goals else []), *(["note"] if notes else [])]
    rows = []
    for record in records:
        cells = [shown(record.values[name]) if name in record.values else "" for name in figures]
        rows.append(
            [
                _cell(record.case),
                record.status,
                *cells,
                *([record.goal] if goals else []),
                *([_cell(record.note)] if notes else []),
            ]
        )
    return table(heading, rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
