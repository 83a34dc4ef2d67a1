"""The command for a GPU, tried without one: what becomes of its cases, and that it finds what is wrong."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, speed
from benchmarks.gpu.bench import Bench, Case, Found, NotHere, WrongResult

BENCH = Bench(torch.device("cpu"))


def raising(error: BaseException):
    def run() -> Found:
        raise error

    return run


CASES = [
    Case("right", lambda: Found({"ms": 1.5})),
    Case("slow", lambda: Found({"ms": 3.0}, "at most 2 ms", met=False)),
    Case("other", raising(WrongResult("error 1e+00"))),
    Case("none", raising(NotHere("no such card"))),
    Case("lost", raising(RuntimeError("CUDA error: an illegal memory access\nand more"))),
    Case("after", lambda: Found()),
]


def results(journal) -> dict[str, str]:
    return {one["case"]: one["result"] for one in command.read(journal)}


def test_every_case_is_noted_and_a_lost_card_ends_the_process_only(tmp_path):
    journal = tmp_path / "records.jsonl"
    journal.write_text("")
    assert not command.run_cases(BENCH, "step", CASES, journal)
    assert "after" not in results(journal)
    assert command.run_cases(BENCH, "step", CASES, journal)
    expected = {"right": "ok", "slow": "ok", "other": "wrong", "none": "skipped", "lost": "failed", "after": "ok"}
    assert results(journal) == expected  # goals are for GPUs
    text = command.report(command.read(journal))
    assert "There was no GPU" in text
    assert "| step | right | ok | ms 1.5 |  |" in text


@pytest.mark.parametrize(
    ("ends", "expected"), [(1, {"first": "died", "second": "ok"}), (2, {"first": "died", "second": "died"})]
)
def test_a_case_that_ends_its_process_is_named_and_the_next_one_goes_on(tmp_path, monkeypatch, ends, expected):
    journal, started = tmp_path / "records.jsonl", []
    journal.write_text("")

    def process(*args, **kwargs):
        case = ("first", "second", "third")[len(started)]
        started.append(case)
        if len(started) > ends:
            if case in expected:
                command.note(journal, "card", case, "ok")
            return subprocess.CompletedProcess(args, 0)
        command.note(journal, "card", case, "begun")
        return subprocess.CompletedProcess(args, -11)

    monkeypatch.setattr(command.subprocess, "run", process)
    command.run_step("card", time.monotonic() + 60, tmp_path, journal)
    assert results(journal) == expected


def test_recordings_that_compute_nothing_are_found_out(monkeypatch):
    monkeypatch.setattr(Bench, "recorder", lambda self: lambda function: lambda: None)
    with pytest.raises(WrongResult, match=r"\(1, 1\): error"):
        checks.graphs(BENCH)[0].run()


def test_kernels_that_ignore_windows_are_found_out(monkeypatch):
    def ignores_windows(*args, **kwargs):
        return checks.reference_kernel(*args, **{**kwargs, "window_size": (-1, 0)})

    monkeypatch.setattr(checks, "paged_kernel", lambda device: ignores_windows)
    with pytest.raises(WrongResult, match="does not agree"):
        checks.pages(BENCH)[0].run()


def test_decode_steps_and_prompts_are_measured():
    found = [cases(BENCH)[0].run() for cases in (speed.decode, speed.prefill)]
    assert found[0].values["by"] == "paged cache, plain forward, recorded decode steps"
    assert found[0].goal == "at most 1.25 x reading"
    assert all(one.values["ms"] > 0 for one in found)
