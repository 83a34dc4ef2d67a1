"""Runs the steps one after the other, each in a process of its own, whatever becomes of the one before."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.bench import Step
from benchmarks.gpu.child import CONTEXT_LOST
from benchmarks.gpu.records import Journal, Record

MIN_STEP_S = 5.0
"""A step is not begun with less time than that: its process needs some seconds to start."""

MAX_PROCESSES = 6
"""Processes of one step: a case that ends its process is left out, and the others go on in the next one."""

STAND_IN_FACTOR = 4
"""How much longer than on a card a step may take where there is none: a processor may have others to serve."""

GRACE_S = 5.0
"""How long a process may take beyond its step's time before it is ended."""


def run(
    steps: Sequence[Step], journal: Journal, logs: Path, seconds: float, stand_in: bool, faults: Mapping[str, str]
) -> None:
    """Run the steps within `seconds`, writing records to the journal and what processes print to `logs`."""
    deadline = time.monotonic() + seconds
    for number, step in enumerate(steps):
        left = deadline - time.monotonic()
        # What later steps were promised is kept for them, as far as it goes.
        later = sum(one.seconds for one in steps[number + 1 :])
        budget = min(left, max(step.seconds, left - later) * (STAND_IN_FACTOR if stand_in else 1))
        print(f"\n# {step.title}: at most {budget:.0f} s", flush=True)
        run_step(step, journal, logs / f"{step.name}.log", budget, stand_in, faults.get(step.name))


def run_step(step: Step, journal: Journal, log: Path, seconds: float, stand_in: bool, fault: str | None) -> None:
    """Run a step in as many processes as it takes, within `seconds`."""
    deadline = time.monotonic() + seconds
    for _ in range(MAX_PROCESSES):
        left = deadline - time.monotonic()
        if left < MIN_STEP_S:
            _note(journal, Record(step.name, "the rest", "skipped", note=f"no time: {max(0.0, left):.0f} s are left"))
            return
        code = _run_process(step, journal, log, left, stand_in, fault)
        if code == 0:
            return
        case = journal.unfinished(step.name)
        if case is not None:
            _note(journal, Record(step.name, case, "died", note=_cause(code)))
        elif code != CONTEXT_LOST:
            _note(journal, Record(step.name, "all", "died", note=f"{_cause(code)} outside of its cases; see {log}"))
            return
    _note(journal, Record(step.name, "the rest", "skipped", note=f"{MAX_PROCESSES} processes of this step have ended"))


def _run_process(
    step: Step, journal: Journal, log: Path, seconds: float, stand_in: bool, fault: str | None
) -> int | None:
    """The exit code of a process that runs the cases without a record; None if it had to be ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.child", step.name, "--journal", str(journal.path)]
    command += ["--seconds", f"{seconds:.1f}", *(["--stand-in"] if stand_in else [])]
    command += ["--fault", fault] if fault is not None else []
    with log.open("a") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            return process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        except BaseException:
            process.kill()
            raise


def _cause(code: int | None) -> str:
    if code is None:
        return "its process was ended, because the step's time was over"
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"


def _note(journal: Journal, record: Record) -> None:
    journal.add(record)
    print(record.line(), flush=True)
