"""Everything that has to be known about a CUDA machine, in one command of a few minutes and without a network.

    python -m benchmarks.gpu [--out artifacts/gpu] [--minutes 8] [--steps card,decode]

Each step runs in a process of its own. An error ends a case. If it loses the GPU's context or ends the process, that is
noted, and another process goes on with the next case. Each result is written at once to `records.jsonl`; in the end
comes one table, `report.md`. The exit code is 1 if something was wrong or failed. A missed goal is not an error.

Without a GPU everything runs on the processor with small shapes, to test the command, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from benchmarks.common.tables import table
from benchmarks.gpu import checks, speed
from benchmarks.gpu.bench import Bench, Case, NotHere, WrongResult

STEPS: dict[str, tuple[Callable[[Bench], Sequence[Case]], float]] = {
    "card": (speed.card, 30.0),
    "pages": (checks.pages, 90.0),
    "graphs": (checks.graphs, 45.0),
    "families": (checks.families, 240.0),
    "training": (checks.training, 45.0),
    "quantization": (checks.quantization, 45.0),
    "decode": (speed.decode, 140.0),
    "prefill": (speed.prefill, 60.0),
}
"""By name: its cases, and the most seconds that it may take."""

BAD = ("wrong", "failed", "died")
MAX_PROCESSES = 6
"""Of a step: each one ends with a case that loses the GPU."""

NO_GPU = "**There was no GPU.** Everything ran on the processor with small shapes; no figure says anything about a GPU."

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("artifacts/gpu"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="the most that everything together may take")
    parser.add_argument("--steps", default=",".join(STEPS), help="which steps")
    parser.add_argument("--in-process", metavar="STEP", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.steps.split(",")
    if not set(names) <= set(STEPS):
        parser.error(f"the steps are {', '.join(STEPS)}")
    journal = arguments.out / "records.jsonl"
    if arguments.in_process:
        bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        torch.set_num_threads(torch.get_num_threads() if bench.real else 1)
        whole = run_cases(bench, arguments.in_process, STEPS[arguments.in_process][0](bench), journal)
        sys.stdout.flush()
        os._exit(0 if whole else 1)  # at once: to tear a lost context down may never end
    arguments.out.mkdir(parents=True, exist_ok=True)
    journal.write_text("")
    deadline = time.monotonic() + 60 * arguments.minutes
    try:
        for name in names:
            seconds = STEPS[name][1] if torch.cuda.is_available() else deadline
            run_step(name, min(deadline, time.monotonic() + seconds), arguments.out, journal)
    finally:
        (arguments.out / "report.md").write_text(report(read(journal)))
    print(f"Everything is in {arguments.out / 'report.md'}")
    sys.exit(any(one["result"] in BAD for one in read(journal)))


def run_step(name: str, deadline: float, out: Path, journal: Path) -> None:
    """Run the cases of a step, in as many processes as it takes."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--in-process", name, "--out", str(out)]
    for _ in range(MAX_PROCESSES):
        with (out / f"{name}.log").open("a") as log:
            try:
                if not subprocess.run(command, stderr=log, timeout=max(1.0, deadline - time.monotonic())).returncode:
                    return
                reason = "its process ended"
            except subprocess.TimeoutExpired:
                reason = "the step's time was over"
        begun = [one for one in read(journal) if one["step"] == name and one["result"] == "begun"]
        if begun or not any(one["step"] == name for one in read(journal)):
            note(journal, name, begun[-1]["case"] if begun else "all", "died", error=f"{reason}; see {name}.log")
        if time.monotonic() >= deadline or not begun:
            return


def run_cases(bench: Bench, step: str, cases: Sequence[Case], journal: Path) -> bool:
    """Run the cases that have no record yet. False if the GPU's context is lost."""
    done = {one["case"] for one in read(journal) if one["step"] == step}
    for case in cases:
        if case.name in done:
            continue
        note(journal, step, case.name, "begun")
        try:
            found = case.run()
        except (WrongResult, NotHere) as error:
            note(journal, step, case.name, "wrong" if isinstance(error, WrongResult) else "skipped", error=str(error))
        except Exception as error:  # whatever a GPU answers, the other cases go on
            traceback.print_exc()
            note(journal, step, case.name, "failed", error=repr(error).partition("\\n")[0])
            if "CUDA error" in str(error):
                return False
        else:
            missed = bench.real and not found.met  # goals are for GPUs
            note(journal, step, case.name, "missed" if missed else "ok", found.values, found.goal)
    return True


def note(journal: Path, step: str, case: str, result: str, values: Any = None, goal: str = "", error: str = "") -> None:
    """Write a record down."""
    record = {"step": step, "case": case, "result": result, "values": values or {}, "goal": goal, "error": error}
    with journal.open("a") as file:
        file.write(json.dumps(record) + "\n")
    if result != "begun":
        print(f"{result:>8}  {step}: {case}  {_figures(record)}", flush=True)


def read(journal: Path) -> list[Record]:
    """The last record of each case."""
    lines = map(json.loads, journal.read_text().splitlines())
    return list({(one["step"], one["case"]): one for one in lines}.values())


def report(records: Sequence[Record]) -> str:
    """One table."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    where = ", ".join(machine.describe().values()) + (f", {gpu}" if gpu else "")
    rows = [[one["step"], one["case"], one["result"], _figures(one), one["goal"]] for one in records]
    said = [f"# {gpu or 'What a GPU has to prove'}", "", where, ""] + ([] if gpu else [NO_GPU, ""])
    return "\n".join([*said, table(("step", "case", "result", "figures", "goal"), rows), ""])


def _figures(record: Record) -> str:
    shown = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record["values"].items()
    ]
    return "; ".join([*shown, *([record["error"]] if record["error"] else [])]).replace("|", "\\|")


if __name__ == "__main__":
    main()
