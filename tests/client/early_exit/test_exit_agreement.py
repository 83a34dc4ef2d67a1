"""What a session agrees on with its servers, over all of its calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import EarlyExit
from swarm.client.early_exit.exit_agreement import ExitAgreement
from swarm.data_structures import Span
from swarm.errors import InvalidSpan, UsageError

SPAN = Span(2, 9)
PROJECT = EarlyExit(fill="project", verify=False)


@given(st.lists(st.sets(st.integers(2, 8)), max_size=4))
def test_spans_are_cut_for_all_calls_and_not_where_they_begin(calls):
    agreement = ExitAgreement()
    for blocks in calls:
        agreement = agreement.including(EarlyExit(boundaries=sorted(blocks)), SPAN)
    assert agreement == ExitAgreement(False, tuple(sorted(set().union(*calls) - {2})))
    assert agreement.including(EarlyExit(), SPAN) == agreement


def test_spans_whose_servers_let_tokens_leave_are_not_cut():
    cut, inside = ExitAgreement(boundaries=(3,)), ExitAgreement().including(PROJECT, SPAN)
    assert inside == inside.including(EarlyExit(), SPAN) == ExitAgreement(early_exits=True)
    for agreement, options in ((cut, PROJECT), (inside, EarlyExit(boundaries=(3,)))):
        with pytest.raises(UsageError, match=r"boundaries=\(3,\), which do not go together .* use another session"):
            agreement.including(options, SPAN)
    with pytest.raises(InvalidSpan, match="use blocks from 2 to 8"):
        cut.including(EarlyExit(boundaries=(9,)), SPAN)
