"""Everything that has to be known about a CUDA machine, in one command of at most eight minutes and without a network.

    python -m benchmarks.gpu [--out artifacts/gpu] [--minutes 8] [--steps card,decode] [--break STEP=FAULT]

It goes on after whatever fails and writes each result down as soon as it is there: `records.jsonl`, then `report.md`
and `report.json`. Without a card a stand-in for CUDA's own calls takes its place, with small shapes, and the report
says so. `docs/gpu.md` says what is checked, and which code has never run on a card. The exit code is 1 if something
computed wrong results or failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.gpu import breaking, report, runner
from benchmarks.gpu.records import BAD, Journal
from benchmarks.gpu.steps import STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("artifacts/gpu"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="the most that everything together may take")
    parser.add_argument("--steps", help=f"some of {','.join(STEPS)}; all of them if left out")
    parser.add_argument("--stand-in", action="store_true", help="use the stand-in even where there is a card")
    parser.add_argument(
        "--break", dest="faults", action="append", default=[], metavar="STEP=FAULT",
        help=f"break a step on purpose: {', '.join(breaking.FAULTS)}",
    )  # fmt: skip
    arguments = parser.parse_args()
    names = arguments.steps.split(",") if arguments.steps else list(STEPS)
    try:
        faults = dict(map(breaking.parse, arguments.faults))
    except ValueError as error:
        parser.error(str(error))
    unknown = [name for name in (*names, *faults) if name not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; the steps are {', '.join(STEPS)}")
    sys.exit(_run(arguments.out, arguments.minutes * 60, names, arguments.stand_in, faults))


def _run(out: Path, seconds: float, names: list[str], stand_in: bool, faults: dict[str, str]) -> int:
    began = time.monotonic()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in (out / "records.jsonl", *logs.glob("*.log")):
        old.unlink(missing_ok=True)
    stand_in = stand_in or not torch.cuda.is_available()
    where = machine.describe() | {"gpu": "none" if stand_in else torch.cuda.get_device_name(0)}
    if stand_in:
        print(report.NO_GPU.replace("**", ""))
    steps = [STEPS[name] for name in names]
    journal = Journal(out / "records.jsonl")
    try:
        runner.run(steps, journal, logs, seconds, stand_in, faults)
    finally:
        records, took = journal.records(), time.monotonic() - began
        (out / "report.md").write_text(report.markdown(steps, records, where, took))
        (out / "report.json").write_text(report.as_json(records, where, took))
    print(f"\n{report.summary(records)}. Everything is in {out / 'report.md'} and {out / 'report.json'}")
    return int(any(record.status in BAD for record in records))


if __name__ == "__main__":
    main()
