"""The process of one step: runs its cases and writes each record down.

Exit code 75 says that the card's context is lost: the rest of the cases needs a new process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, Case, NotHere, Step, WrongResult
from benchmarks.gpu.breaking import broken
from benchmarks.gpu.records import Journal, Measured, Record, Status
from benchmarks.gpu.stand_in.card import CARD, card
from benchmarks.gpu.steps import STEPS
from swarm.common.outcome import result_or_error
from swarm.errors import InvalidOption

CONTEXT_LOST = 75
"""Exit code of a process whose card answers nothing any more."""


def is_context_lost(error: BaseException) -> bool:
    """Whether an error says that every later call of CUDA in this process fails too."""
    if isinstance(error, (NotHere, WrongResult, InvalidOption)):
        return False  # they may quote errors of CUDA that a trial has met and survived
    said = str(error)
    lost = "CUDA error" in said or "CUBLAS_STATUS_EXECUTION_FAILED" in said
    return lost and "capturing" not in said and not isinstance(error, torch.OutOfMemoryError)


def run_case(bench: Bench, step: str, case: Case, before: Callable[[], None]) -> tuple[Record, bool]:
    """What became of a case, and whether the card's context is lost."""
    began = time.monotonic()

    def work() -> Measured:
        before()
        found = case.run(bench)
        torch.cuda.synchronize(bench.device)
        return found

    found = result_or_error(work)
    seconds = time.monotonic() - began
    if isinstance(found, Measured):
        # Goals are for cards: what stands in for one is not judged.
        met = found.goal is None or not bench.real or found.goal.met(found.values)
        goal = str(found.goal) if found.goal is not None else ""
        return Record(step, case.name, "ok" if met else "missed", dict(found.values), goal, found.note, seconds), False
    if isinstance(found, (KeyboardInterrupt, SystemExit)):
        raise found
    sys.stderr.write("".join(traceback.format_exception(found)))
    lost = is_context_lost(found) or not _answers(bench.device)
    if not lost and not isinstance(found, (NotHere, InvalidOption)):
        bench.forget()
    return Record(step, case.name, _status(found), note=_said(found), seconds=seconds), lost


def _answers(device: torch.device) -> bool:
    """Whether the card's context is still there."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _status(error: BaseException) -> Status:
    if isinstance(error, WrongResult):
        return "wrong"
    if isinstance(error, (NotHere, InvalidOption)):
        return "skipped"
    return "no memory" if isinstance(error, torch.OutOfMemoryError) else "failed"


def _said(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, (WrongResult, NotHere, InvalidOption)) else f"{type(error).__name__}: {first}"


def run_step(bench: Bench, step: Step, before: Callable[[int], None]) -> bool:
    """Run the cases of a step that have no record yet. False if the card's context is lost."""
    done = {record.case for record in bench.journal.records(step.name)}
    for number, case in enumerate(step.cases(bench)):
        if case.name in done:
            continue
        if bench.seconds_left < case.seconds:
            left = max(0.0, bench.seconds_left)
            note = f"no time: {left:.0f} s of the step's time are left, and it takes about {case.seconds:.0f} s"
            record, lost = Record(step.name, case.name, "skipped", note=note), False
        else:
            bench.journal.begin(step.name, case.name)
            record, lost = run_case(bench, step.name, case, lambda number=number: before(number))  # type: ignore[misc]
        bench.journal.add(record)
        print(record.line(), flush=True)
        if lost:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = CARD if arguments.stand_in else torch.device("cuda", 0)
    if arguments.stand_in:
        torch.set_num_threads(1)
    step = STEPS[arguments.step]
    with card() if arguments.stand_in else nullcontext(), broken(arguments.fault) as before:
        bench = Bench(device, not arguments.stand_in, Journal(arguments.journal), deadline)
        whole = run_step(bench, step, before)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if whole else CONTEXT_LOST)  # at once: to tear a card's context down may take long, or never end


if __name__ == "__main__":
    main()
