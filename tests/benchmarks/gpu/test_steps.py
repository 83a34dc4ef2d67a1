"""The steps on what stands in for a card: whole, and with each thing broken that can break."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import runner, schedules, spans
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.bench import Bench, Case, NotHere, Step, WrongResult
from benchmarks.gpu.breaking import broken
from benchmarks.gpu.child import run_step
from benchmarks.gpu.records import Goal, Journal, Measured, Record
from benchmarks.gpu.schedules import Errors
from benchmarks.gpu.stand_in.card import CARD, NAME, card
from benchmarks.gpu.steps import STEPS
from swarm.common.trials import Timing
from swarm.models.execution.trials import forward_trials
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.execution.trials.layout_trials import choose_layout
from swarm.models.weights.gpu_linears import choose_kernel
from tests import zoo

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def bench(tmp_path):
    with card():
        yield Bench(CARD, False, Journal(tmp_path / "records.jsonl"), time.monotonic() + 300)


def records_of(bench: Bench, step: Step, fault: str | None = None) -> dict[str, Record]:
    with broken(fault) as before:
        run_step(bench, step, before)
    return {record.case: record for record in bench.journal.records(step.name)}


def some(step: str, *cases: str) -> Step:
    """A step with those cases only whose names begin so."""
    whole = STEPS[step]
    return replace(whole, cases=lambda bench: [case for case in whole.cases(bench) if case.name.startswith(cases)])


def raises(error: Exception) -> Case:
    def run(bench: Bench) -> Measured:
        raise error

    return Case(type(error).__name__, run)


def test_what_becomes_of_cases(bench):
    good = Case("good", lambda bench: Measured({"ratio": 2.0}, Goal("ratio", 1.5)))
    cases = [
        good,
        raises(WrongResult("off by 3")),
        raises(NotHere("no such thing")),
        raises(torch.OutOfMemoryError("CUDA out of memory")),
        raises(ValueError("no\nand more")),
        Case("long", good.run, seconds=1e6),
    ]
    found = records_of(bench, Step("decode", "", 1.0, lambda bench: cases))
    assert {name: (one.status, one.note.partition(":")[0]) for name, one in found.items()} == {
        "good": ("ok", ""),  # goals are for cards
        "WrongResult": ("wrong", "off by 3"),
        "NotHere": ("skipped", "no such thing"),
        "OutOfMemoryError": ("no memory", "OutOfMemoryError"),
        "ValueError": ("failed", "ValueError"),
        "long": ("skipped", "no time"),
    }
    real = Bench(CARD, True, Journal(bench.journal.path.with_name("real.jsonl")), time.monotonic() + 10)
    (judged,) = records_of(real, Step("decode", "", 1.0, lambda bench: [good])).values()
    assert (judged.status, judged.goal) == ("missed", "ratio <= 1.5")


def test_a_case_that_loses_the_context_ends_the_process_and_is_not_tried_again(bench):
    lost = raises(RuntimeError("CUDA error: an illegal memory access was encountered"))
    step = Step("decode", "", 1.0, lambda bench: [lost, Case("next", lambda bench: Measured())])
    assert not run_step(bench, step, lambda number: None)
    assert [one.status for one in bench.journal.records()] == ["failed"]
    assert run_step(bench, step, lambda number: None)
    assert [one.status for one in bench.journal.records()] == ["failed", "ok"]


def test_a_card_that_no_longer_answers_ends_the_process_whatever_a_case_says(bench, monkeypatch):
    """A trial may meet the error that loses the context, and leave the case with no card to go on with."""

    def lost(device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    cases = [raises(NotHere("not used on this card: it fails: CUDA error")), raises(WrongResult("off by 3"))]
    step = Step("decode", "", 1.0, lambda bench: cases)
    assert [run_step(bench, step, lambda number: None) for _ in range(3)] == [False, False, True]
    assert [one.status for one in bench.journal.records()] == ["skipped", "wrong"]


def test_the_doctor_says_which_way_the_card_takes(bench):
    (found,) = records_of(bench, some("card", "swarm doctor")).values()
    assert found.status == "ok", found
    assert NAME in found.note
    assert "paged cache, " in found.note or "contiguous cache, " in found.note  # whichever is faster here
    assert "pages by varlen_attn: " in found.note
    assert "graph of decode steps: " in found.note


def test_a_wrong_kernel_is_found(bench):
    found = records_of(bench, some("pages", "kernel bf16"), "kernel")
    assert {one.status for one in found.values()} == {"wrong"}
    assert "varlen_attn: wrong results" in next(iter(found.values())).note


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_one_kind_of_wrong_tokens_is_an_error(seed, kind):
    """Even if it is a few of thousands, as single tokens are beside prompts."""
    for schedule in (schedules.random_schedule(seed, (255, 256, 257)), schedules.decode_schedule(seed, 6, 256)):
        kinds = schedules._kinds(schedule)
        inputs, expected = torch.zeros(len(kinds), 4), torch.ones(len(kinds), 4)
        assert schedules.errors(schedule, inputs, expected, expected) == Errors(0, 0, 0, 0)
        outputs = expected.clone()
        outputs[kinds == kind] = 100.0
        found = schedules.errors(schedule, inputs, outputs, expected)
        assert (found.median > 1) == (found.of_a_round > 1) == bool((kinds == kind).any())


@pytest.mark.parametrize("number", range(7))
def test_wrong_tokens_of_one_round_are_an_error(number):
    """Of seven rounds of single tokens one is wrong, or only one of its tokens is: no median over all of them moves."""
    schedule = schedules.decode_schedule(0, 7, 20)
    of_round = schedules._rounds(schedule) == 1 + number
    inputs, expected = torch.zeros(len(of_round), 4), torch.ones(len(of_round), 4)
    for wrong in (of_round, of_round.nonzero()[:1, 0]):
        outputs = expected.clone()
        outputs[wrong] = 1.5
        found = schedules.errors(schedule, inputs, outputs, expected)
        assert (found.median, found.largest) == (0, 0.5)
        assert found.of_a_round == (0.5 if wrong is of_round else 0)
        exact = Errors(0, 0, 0, 0)
        with pytest.raises(WrongResult, match="of_a_round" if wrong is of_round else "percentile_99|largest"):
            schedules.require_close(found, exact, torch.bfloat16, "a round")
        schedules.require_close(found, exact, torch.bfloat16, "a round", mixture=True)


def test_mixtures_of_experts_are_known():
    mixtures = {family for family in zoo.FAMILIES if schedules.is_mixture(zoo.config_of(family))}
    assert {"mixtral", "deepseek_v3", "qwen2_moe", "gpt_oss", "olmoe"} <= mixtures
    assert not {"llama", "gpt2", "gemma2", "bloom", "qwen3", "olmo3", "hunyuan_v1_dense", "ernie4_5"} & mixtures


def test_a_kernel_that_is_wrong_for_single_tokens_alone_is_not_chosen(bench):
    with broken("decode"):
        strategy = choose_layout(spans.load(bench, "7B"), "paged").strategy
    assert strategy.layout == "contiguous"
    assert "pages by varlen_attn: not used, its results are wrong for these blocks" in map(str, strategy.trials)


def test_graphs_are_right_whatever_happens_in_between(bench):
    found = records_of(bench, some("graphs", "a ", "no memory", "LoRA"))
    assert len(found) == 6
    assert {one.status for one in found.values()} == {"ok"}, found


def test_a_capture_that_fails_is_found(bench):
    found = records_of(bench, some("graphs", "decode steps, llama bf16", "a pool that moved"), "capture")
    assert {one.status for one in found.values()} == {"wrong"}


def faster(monkeypatch, *, graphs: bool = True, pages: bool = True) -> None:
    """Trials find what they are told about speed."""

    def decodes_faster(candidate, other, *sizes) -> Timing:
        wanted = pages if other.strategy.layout == "contiguous" else graphs
        return Timing(1.0, 2.0) if wanted else Timing(2.0, 1.0)

    monkeypatch.setattr(forward_trials, "_decodes_faster", decodes_faster)


@pytest.mark.parametrize(
    ("fault", "layout", "recorded", "reason"),
    [
        (None, "paged", True, "graph of decode steps: used, right and faster: 1000.00 ms a step instead of 2000.00"),
        ("kernel", "contiguous", False, "pages by varlen_attn: not used, its results are wrong for these blocks"),
        ("memory", "contiguous", False, "pages by varlen_attn: not used, it fails: CUDA out of memory"),
        ("capture", "paged", False, "graph of decode steps: not used, recording failed: CUDA error: operation not"),
    ],
)
def test_the_product_falls_back_and_says_why(bench, monkeypatch, fault, layout, recorded, reason):
    faster(monkeypatch)
    with broken(fault):
        strategy = spans.load(bench, "7B").strategy
    assert (strategy.layout, strategy.graph_recorder is not None) == (layout, recorded)
    assert any(str(trial).startswith(reason) for trial in strategy.trials), strategy.trials


def test_a_wrong_kernel_for_packed_weights_is_not_used_and_named(bench):
    choose_kernel.cache_clear()
    found = records_of(bench, some("quantization", "a span in int8"), "kernel")
    choose_kernel.cache_clear()
    (one,) = found.values()
    assert one.status == "ok", one
    for way in ("Triton in steps of 128", "Triton in steps of 256", "torch"):
        assert f"by {way}: not used, its results are wrong for 1 tokens" in one.note
    assert "by unpacking: used, no kernel is right and faster" in one.note


def test_what_is_not_faster_is_not_used(bench, monkeypatch):
    faster(monkeypatch, graphs=False)
    strategy = spans.load(bench, "7B").strategy
    assert (strategy.layout, strategy.graph_recorder) == ("paged", None)
    faster(monkeypatch, pages=False)
    strategy = spans.load(bench, "7B").strategy
    assert (strategy.layout, strategy.graph_recorder) == ("contiguous", None)
    assert str(strategy.trials[-1]).startswith("pages for 16 sessions: not used, 2000.00 ms a step instead of 1000.00")


def test_pages_stay_where_they_were_asked_for_or_cannot_be_compared(bench, monkeypatch):
    faster(monkeypatch)
    model = spans.load(bench, "7B")
    faster(monkeypatch, pages=False)
    assert choose_forward(model).strategy.layout == "contiguous"
    assert choose_forward(model, requested="paged").strategy.layout == "paged"

    def no_memory(candidate, other, *sizes) -> Timing:
        if other.strategy.layout == "contiguous":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Timing(1.0, 2.0)

    monkeypatch.setattr(forward_trials, "_decodes_faster", no_memory)
    found = choose_forward(model).strategy
    assert found.layout == "paged"
    assert "not compared with a contiguous cache: it fails: CUDA out of memory" in str(found.trials[-1])


def test_decoding_goes_on_without_pages(bench, monkeypatch):
    faster(monkeypatch)
    found = records_of(bench, some("decode", "7B bf16, batch 1, context 128"), "memory")
    statuses = {name.rpartition(", ")[2]: one.status for name, one in found.items()}
    assert statuses == {"graphed": "skipped", "paged": "skipped", "plain": "ok"}
    notes = [one.note for one in found.values() if one.status == "skipped"]
    assert all("CUDA out of memory" in note for note in notes)


@contextmanager
def command(tmp_path: Path, *arguments: str):
    """The command's exit code, its output, and its report."""
    line = [sys.executable, "-m", "benchmarks.gpu", "--stand-in", "--minutes", "25", "--out", str(tmp_path)]
    line += arguments
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1750)
    report = json.loads((tmp_path / "report.json").read_text())
    yield done, [Record(**one) for one in report["records"]]


@pytest.mark.parametrize(
    "arguments", [("--steps", "nothing"), ("--break", "nothing=kernel"), ("--break", "pages=nothing")]
)
def test_wrong_arguments_are_refused(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "nothing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_without_a_card_says_so_and_ends_well(tmp_path):
    with command(tmp_path, "--steps", "card") as (done, records):
        assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("There was no GPU.")
    assert "There was no GPU" in (tmp_path / "report.md").read_text()
    assert {one.status for one in records} <= {"ok", "skipped"}


FAULTS = {
    "card": "crash", "pages": "kernel", "graphs": "capture", "families": "error", "training": "crash",
    "quantization": "error", "decode": "memory", "generate": "error", "prefill": "kernel", "engine": "capture",
    "profile": "error",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_step_fails_on_purpose_and_the_rest_goes_on(tmp_path):
    assert set(FAULTS) == set(STEPS)
    with command(tmp_path, *(f"--break={step}={fault}" for step, fault in FAULTS.items())) as (done, records):
        assert done.returncode == 1, done.stdout
    found: dict[str, set[str]] = {step: {one.status for one in records if one.step == step} for step in STEPS}
    for step, fault in FAULTS.items():
        expected = {"crash": "died", "error": "failed", "kernel": "wrong", "capture": "wrong"}.get(fault)
        if fault in ("crash", "error"):  # of one case; what is right with the others is right here
            assert sum(one.status not in ("ok", "skipped") for one in records if one.step == step) == 1, (step, found)
        if step == "prefill":  # falls back, and says so
            assert found[step] == {"ok"}
            assert {one.note for one in records if one.step == step} == {"plain cache"}
        elif step == "decode":
            assert found[step] == {"ok", "skipped"}
        elif step == "engine":
            assert "skipped" in found[step]
        else:
            assert expected in found[step], (step, found)
    several = {"card", "pages", "graphs", "families", "training", "quantization", "decode", "engine", "prefill"}
    for step in several - {"pages"}:
        assert "ok" in found[step], (step, found)
    report = (tmp_path / "report.md").read_text()
    assert "## What failed" in report
    assert "its process ended with exit code 139" in report
    assert "an illegal memory access was encountered" in report


@pytest.mark.slow
def test_a_case_that_never_ends_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 1.0)
    journal = Journal(tmp_path / "records.jsonl")
    runner.run_step(STEPS["card"], journal, tmp_path / "log", 30.0, True, "hang")
    statuses = {one.case: one.status for one in journal.records()}
    assert statuses == {"what there is": "ok", "memory": "died", "the rest": "skipped"}
