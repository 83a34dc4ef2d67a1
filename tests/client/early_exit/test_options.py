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


def test_the_first_exit():
    assert EarlyExit(threshold=1.0).first_exit((2, 4)) is None
    assert EarlyExit(threshold=1.0, decay=2.0).first_exit((2, 4)) == 2
    assert EarlyExit(threshold={4: 0.5}).first_exit((2, 4)) == 4


def test_boundaries_may_be_any_sequence():
    assert EarlyExit().boundaries == ()
    assert EarlyExit(boundaries=[2, 4]).boundaries == (2, 4)
    assert EarlyExit(boundaries=[2, 4]) == EarlyExit(boundaries=(2, 4))
    similar = EarlyExit(confidence="similarity", min_block=4, boundaries=(3, 4))
    assert similar.boundaries == (3, 4), "the hidden states in front of both are compared"
    similar = EarlyExit("similarity", {6: 0.5}, boundaries=[3])
    assert similar.boundaries == (3,), "a server may begin at block 6"
    assert EarlyExit(threshold=1.0, decay=2.0, boundaries=[3]).boundaries == (3,), "the threshold falls"


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
        ({"boundaries": (0,)}, "from 1 on, each larger than the one before"),
        ({"boundaries": 4}, "use a tuple of numbers of blocks"),
        ({"boundaries": (4, 4)}, "each larger than the one before"),
        ({"boundaries": (4, 2)}, "each larger than the one before"),
        ({"boundaries": (True,)}, "numbers of blocks from 1 on"),
        ({"boundaries": (2.0,)}, "numbers of blocks from 1 on"),
        ({"boundaries": "48"}, "numbers of blocks from 1 on"),
        ({"boundaries": range(1, 258)}, "257 blocks are too many; use at most 256"),
        ({"boundaries": (4,), "fill": "project", "verify": False}, "does not go together with fill='project'"),
        ({"boundaries": (2, 4, 6), "min_block": 3, "max_block": 5}, r"let no token leave in front of \[2, 6\]"),
        ({"boundaries": (2, 4), "threshold": {4: 0.1}}, r"let no token leave in front of \[2\]"),
        ({"boundaries": (4,), "threshold": 1.0}, r"let no token leave in front of \[4\]"),
        ({"boundaries": (2, 4), "threshold": {2: 0.5, 4: 1.0}}, r"let no token leave in front of \[4\]"),
        ({"boundaries": (4,), "threshold": 1.0, "confidence": "similarity"}, r"let no token leave in front of \[4\]"),
        (
            {"boundaries": (3, 7), "threshold": {6: 0.5}, "confidence": "similarity"},
            r"let no token leave in front of \[7\]",
        ),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(UsageError, match=message):
        EarlyExit(**values)
