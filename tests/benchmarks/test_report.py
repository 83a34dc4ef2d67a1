"""Figures of benchmarks: how certain they are, when rounds end, and what changed between two runs."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.report import CONFIDENCE, Figure, Report, confidence, interval, report_parser
from benchmarks.common.tables import show
from scripts.compare_benchmarks import Change, changes

VALUES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40)


@given(VALUES)
def test_an_interval_is_around_the_median_and_the_smallest_that_is_confident(values):
    low, high = interval(values)
    ranked = sorted(values)
    cut = ranked.index(low)
    assert low <= statistics.median(values) <= high
    assert (low, high) == (ranked[cut], ranked[-1 - cut]) or len(set(values)) < len(values)
    if cut and len(set(values)) == len(values):
        assert confidence(len(values), cut) >= CONFIDENCE > confidence(len(values), cut + 1)


def test_the_true_median_lies_in_it_as_often_as_it_says():
    chance = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = interval([chance.expovariate(1) for _ in range(9)])
        hits += low <= 0.693 <= high
    assert hits >= 1000 * CONFIDENCE - 30


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.6123, "0.612"), (11.23, "11.2"), (1234.5, "1234"), (0.001234, "0.0012"), (-2, "-2.00")],
)
def test_numbers_have_three_digits(value, text):
    assert show(value) == text


def report(*arguments: str) -> Report:
    return Report(report_parser("", repeats=3).parse_args([*arguments]))


def rounds_of(values, *arguments: str) -> int:
    """How many rounds there are if a figure has these values."""
    found, left = report(*arguments), list(values)
    for _ in found.rounds("here"):
        found.add("ratio", left.pop(0), "more", decides=True)
        found.add("something that does not decide", random.random())
    return len(found.figures[0].values)


def test_rounds_end_when_the_figure_that_decides_is_certain():
    assert rounds_of([1.0] * 30) == 5, "fewer say nothing with so much confidence"
    noisy = [1.0, 2.0] * 3 + [1.5] * 30
    assert 10 < rounds_of(noisy) < 30


def test_rounds_end_when_patience_does(capsys):
    assert rounds_of([1.0, 2.0, 3.0, 4.0], "--patience", "0") == 3
    with report("--patience", "0") as found:
        for number in found.rounds("here"):
            found.add("ratio", 1.0 + number, "more", decides=True)
            found.add("other row", 5.0, where="there")
    printed = capsys.readouterr().out
    assert "| here | 2.00 (1.00 to 3.00) |" in printed
    assert "NOT CERTAIN after 3 rounds: here, ratio: between 1.00 and 3.00" in printed
    assert "other programs and machines used" in printed


def test_two_runs_are_compared(tmp_path):
    def run(**figures) -> dict:
        file = tmp_path / "one.json"
        with report("--json", str(file), "--patience", "0") as found:
            for name, (better, values) in figures.items():
                for value in values:
                    found.add(name, value, better)
        return {"reports": [json.loads(file.read_text())]}

    before = run(speed=("more", [1.0, 1.1, 1.2]), ms=("less", [5.0, 5.1]), gone=("", [1.0]), same=("", [1.0, 3.0]))
    after = run(speed=("more", [0.8, 0.9]), ms=("less", [4.0, 4.1]), new=("", [1.0]), same=("", [2.0, 2.5]))
    verdicts = {one.after.name: one.verdict for one in changes(before, after)}
    assert verdicts == {"speed": "WORSE", "ms": "better", "same": ""}
    assert Change("x", Figure("", "", values=[1.0]), Figure("", "", values=[2.0])).verdict == "other"
