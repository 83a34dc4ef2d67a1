"""What became of a trial, and which of two ways is faster."""

from __future__ import annotations

import itertools
import logging

import pytest

from swarm.common.trials import NotBetter, Timing, Trial, attempt, is_faster


def test_what_became_of_a_trial_can_be_read():
    assert str(Trial("pages", True, "they are faster")) == "pages: used, they are faster"
    assert str(Trial("pages", False, "they are wrong")) == "pages: not used, they are wrong"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotBetter("right, but slow"), "right, but slow"),
        (RuntimeError("no kernel\nand more"), "it fails: no kernel"),
        (AssertionError(), "it fails: AssertionError"),
        (KeyError("name"), "it fails: 'name'"),
    ],
)
def test_a_trial_may_fail_in_any_way(error, reason, caplog):
    def fails() -> None:
        raise error

    with caplog.at_level(logging.WARNING, "swarm.common.trials"):
        assert attempt("A kernel", fails, logging.WARNING) == (None, reason)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (not isinstance(error, NotBetter))
    assert attempt("A kernel", lambda: 3) == (3, "")


def test_who_interrupts_is_not_an_error_of_the_trial():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt("A kernel", interrupted)


def test_medians_of_turns_decide():
    """One turn that something else disturbed changes nothing, for either of the two."""
    clock = [0.0]
    of_first, of_second = itertools.chain([50.0], itertools.repeat(1.0)), itertools.chain([0.1], itertools.repeat(2.0))

    def takes(seconds) -> None:
        clock[0] += next(seconds)

    timing = is_faster(lambda: takes(of_first), lambda: takes(of_second), rounds=3, clock=lambda: clock[0])
    assert timing == Timing(pytest.approx(1.0), pytest.approx(2.0))
    assert timing
    assert not Timing(2.0, 1.0)
    assert not Timing(1.0, 1.0)
    assert str(timing) == "1000.00 ms a step instead of 2000.00"
