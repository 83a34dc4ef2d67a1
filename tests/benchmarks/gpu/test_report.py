"""Records, the journal that several processes write, and the report."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import breaking, report
from benchmarks.gpu.bench import NotHere, Step, WrongResult
from benchmarks.gpu.child import is_context_lost
from benchmarks.gpu.records import Goal, Journal, Record
from benchmarks.gpu.steps import STEPS
from benchmarks.gpu.unproven import ROOT, functions, markdown

STEP = Step("decode", "Decode steps", 1.0, lambda bench: [])
FIRST = Record("decode", "batch 1", "missed", {"ms": 1.5, "way": "paged"}, "ratio <= 1.25", seconds=2.0)
SECOND = Record("decode", "batch 8", "wrong", note="off by 3|4\nand more")


def test_the_journal_names_the_case_that_did_not_end(tmp_path):
    journal = Journal(tmp_path / "records.jsonl")
    assert (journal.records(), journal.unfinished("decode")) == ([], None)
    journal.begin("decode", FIRST.case)
    assert journal.unfinished("decode") == FIRST.case
    journal.add(FIRST)
    assert journal.unfinished("decode") is None
    journal.begin("decode", SECOND.case)
    journal.begin("pages", "a kernel")
    assert journal.unfinished("decode") == SECOND.case
    with journal.path.open("a") as file:
        file.write('{"step": "dec')  # its process was ended while it wrote
    assert journal.records() == journal.records("decode") == [FIRST]
    assert journal.records("pages") == []


def test_the_report_has_every_record_and_names_what_failed():
    text = report.markdown([STEP], [FIRST, SECOND], {"gpu": "Some Card"}, 12.3)
    assert "| batch 1 | missed | 1.5 | paged | ratio <= 1.25 |  |" in text
    assert "| decode | batch 8 | wrong | off by 3\\|4 and more |" in text
    assert "1 missed, 1 wrong" in text
    assert "There was no GPU" not in text
    found = json.loads(report.as_json([FIRST, SECOND], {"gpu": "Some Card"}, 12.3))
    assert [Record(**one) for one in found["records"]] == [FIRST, SECOND]


def test_without_a_card_the_report_says_so_first():
    assert "There was no GPU" in report.markdown([STEP], [FIRST], {"gpu": "none"}, 1.0).splitlines()[2]


def test_goals():
    assert Goal("ratio", 1.25).met({"ratio": 1.25})
    assert not Goal("ratio", 1.25).met({"ratio": 1.26})
    assert Goal("share", 0.5, at_least=True).met({"share": 0.6})
    assert str(Goal("share", 0.5, at_least=True)) == "share >= 0.5"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), True),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("shapes do not fit"), False),
        (WrongResult("relative error"), False),
        (NotHere("no time"), False),
        (NotHere("traced forward: not used, it fails: CUDA error: invalid argument"), False),
        (WrongResult("varlen_attn: it fails: CUDA error: invalid argument"), False),
    ],
)
def test_which_errors_end_a_process(error, lost):
    assert is_context_lost(error) == lost


@pytest.mark.parametrize("text", ["decode", "decode=", "=kernel", "decode=other"])
def test_what_cannot_be_broken_is_refused(text):
    with pytest.raises(ValueError, match="give STEP=FAULT"):
        breaking.parse(text)


def test_the_steps_fit_into_eight_minutes():
    assert 240 < sum(step.seconds for step in STEPS.values()) <= 480


def test_the_page_lists_all_code_that_is_only_for_cards():
    """`python -m benchmarks.gpu.unproven` prints the table anew."""
    names = [one.name for one in functions()]
    assert "models.execution.cuda_graphs.CudaGraphRecorder.__call__" in names
    assert "models.attention.paged_kernels.candidate_kernels" in names
    assert markdown() in (ROOT / "docs" / "gpu.md").read_text()
