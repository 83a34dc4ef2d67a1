"""A short part of the campaign of hostile messages; `make fuzz` runs all of it."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import Plan
from tests.fuzz.run import run

MESSAGES, SECONDS = 1_500, 20.0


@pytest.mark.slow
def test_hostile_messages_of_all_kinds() -> None:
    """On a busy machine it sends fewer of them, and does not look at times."""
    report = run(Plan(MESSAGES, SECONDS, seed=2, may_be_short=True))
    assert not report.violations, report.text
    assert report.messages
