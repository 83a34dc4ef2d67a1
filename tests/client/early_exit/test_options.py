"""When tokens leave, as the caller says."""

from __future__ import annotations

import pytest

from swarm import EarlyExit
from swarm.errors import UsageError


def test_thresholds_for_each_block():
    assert EarlyExit(threshold=0.5).threshold_at(7) == 0.5
    some = EarlyExit(threshold={3: 0.2, 6: 0.4})
    assert [some.threshold_at(block) for block in (3, 4, 6)] == [0.2, None, 0.4]
    between = EarlyExit(threshold=0.5, min_block=3, max_block=5)
    assert [between.threshold_at(block) for block in (2, 3, 5, 6)] == [None, 0.5, 0.5, None]


def test_where_tokens_have_to_be_looked_at():
    boundaries = (2, 4, 6, 8)
    assert EarlyExit().looked_at(boundaries) == [2, 4, 6, 8]
    assert EarlyExit(threshold=1.0).looked_at(boundaries) == []
    assert EarlyExit(threshold=1.0, decay=2.0).looked_at(boundaries) == [2, 4, 6, 8], "the threshold falls"
    assert EarlyExit(threshold={4: 0.5, 8: 1.0}).looked_at(boundaries) == [4]
    assert EarlyExit(min_block=3, max_block=6).looked_at(boundaries) == [4, 6]
    similar = EarlyExit(confidence="similarity", min_block=5, max_block=7)
    assert similar.looked_at(boundaries) == [4, 6], "the hidden states of both are compared"
    project = EarlyExit(threshold={4: 0.5}, fill="project", verify=False)
    assert project.looked_at(boundaries) == [2, 4, 6, 8], "tokens may have left inside the span before"


def test_which_sequences_leave_by_themselves_and_where():
    for batch in ("row", "all"):
        exact, project = EarlyExit(batch=batch), EarlyExit(batch=batch, fill="project", verify=False)
        assert (exact.needs_sessions, exact.leaves_by_row) == (batch == "row", False)
        assert (project.needs_sessions, project.leaves_by_row) == (False, batch == "row")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"confidence": "gut feeling"}, "is not one of softmax"),
        ({"threshold": 1.5}, "between 0 and 1"),
        ({"threshold": {}}, "between 0 and 1"),
        ({"threshold": {2: True}}, "between 0 and 1"),
        ({"threshold": {0: 0.5}}, "integers from 1 on"),
        ({"threshold": {"2": 0.5}}, "integers from 1 on"),
        ({"threshold": {2.0: 0.5}}, "integers from 1 on"),
        ({"threshold": {True: 0.5}}, "integers from 1 on"),
        ({"decay": -1.0}, "decay=-1.0"),
        ({"batch": "some"}, "is not one of row"),
        ({"fill": "copy"}, "is not one of exact, project"),
        ({"fill": "project"}, "needs verify=False: blocks that a token skips never compute it"),
        ({"min_block": 0}, "at least one block"),
        ({"min_block": 4, "max_block": 3}, "no block lies between"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(UsageError, match=message):
        EarlyExit(**values)
