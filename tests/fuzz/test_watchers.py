"""How the campaign judges what processes tell: the pure parts."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.watchers import Taken, count, lag_histogram, not_returned, quantile, since, wrong_in_log

INFINITY = float("inf")


def test_a_quantile_is_interpolated_within_its_bucket():
    histogram = {0.01: 90.0, 0.02: 100.0, INFINITY: 100.0}
    assert quantile(histogram, 0.95) == pytest.approx(0.015)
    assert quantile(histogram, 0.45) == pytest.approx(0.005)


def test_a_quantile_beyond_all_bounds_is_the_last_bound():
    assert quantile({0.01: 1.0, INFINITY: 100.0}, 0.99) == 0.01


def test_only_what_has_come_since_counts():
    before, now = {0.01: 5.0, INFINITY: 6.0}, {0.01: 5.0, INFINITY: 9.0}
    assert since(now, before) == {0.01: 0.0, INFINITY: 3.0}
    assert count(since(now, before)) == 3.0


def test_a_histogram_is_read_from_its_metric_alone():
    readings = {
        ("swarm_loop_lag_seconds_bucket", (("le", "0.01"),)): 2.0,
        ("swarm_loop_lag_seconds_bucket", (("le", "+Inf"),)): 3.0,
        ("swarm_loop_tasks", ()): 7.0,
    }
    assert lag_histogram(readings) == {0.01: 2.0, INFINITY: 3.0}


def test_what_is_kept_is_named_beyond_what_may_be_open_besides():
    before = Taken(0, 0, tasks=5, files=10, sessions=0, cache_tokens=0, charged=0)
    now = Taken(1 << 30, 0, tasks=13, files=27, sessions=1, cache_tokens=0, charged=0)
    assert not_returned(before, now) == ["files 10 -> 27", "sessions 0 -> 1"]


def test_what_a_log_may_not_hold():
    for line, wrong in [
        ("", ""),
        (json.dumps({"level": "WARNING", "message": "slow"}), ""),
        (json.dumps({"level": "ERROR", "message": "broken"}), "broken"),
        (json.dumps({"level": "INFO", "message": "m", "exception": "Traceback"}), "m Traceback"),
        ("Fatal Python error", "Fatal Python error"),
        ("[1]", "[1]"),
    ]:
        assert wrong_in_log(line) == wrong
