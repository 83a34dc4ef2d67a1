"""What a server may say about tokens that have left."""

from __future__ import annotations

import pytest

from swarm.client.wire.reply_checks import AllowedExits, validate_left
from swarm.data_structures import Span
from swarm.errors import ProtocolViolation
from tests.client.fakes import hop

HOP = hop(span=Span(4, 8))
ASKED = AllowedExits((1, 1, 0), (2, 5, 6, 8, 9))


def test_steps_whose_tokens_pass_all_blocks():
    for asked in (None, ASKED):
        for before in (None, (0, 0, 0)):
            assert validate_left(HOP, asked, before, None) is None


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ((0, 0, 0), [5, 6, 0]),
        ((0, 0, 0), [0, 8, 0]),  # in front of the next server's first block
        ((2, 0, 0), [2, 0, 0]),
        ((2, 0, 0), [2, 5, 0]),
        (None, [2, 5, 0]),  # the copy from the server before has not come yet
    ],
)
def test_tokens_that_may_have_left_there(before, left):
    assert validate_left(HOP, ASKED, before, left) == tuple(left)


@pytest.mark.parametrize(
    ("asked", "before", "left", "why"),
    [
        (None, (0, 0, 0), [5, 0, 0], "not asked for"),
        (None, (0, 0, 0), [0, 0, 0], "not asked for"),
        (ASKED, (0, 0, 0), [5, 0], "a step of 3 sequences"),
        (ASKED, (0, 0, 0), [5, 0, 0, 0], "a step of 3 sequences"),
        (ASKED, (0, 0, 0), [7, 0, 0], "sequence 0 cannot"),  # no such exit was asked for
        (ASKED, (0, 0, 0), [0, 2, 0], "sequence 1 cannot"),  # before its span
        (ASKED, (0, 0, 0), [0, 9, 0], "sequence 1 cannot"),  # behind it
        (ASKED, None, [0, 9, 0], "sequence 1 cannot"),
        (ASKED, (0, 0, 0), [0, 0, 5], "sequence 2 cannot"),  # it brings no token
        (ASKED, (2, 0, 0), [0, 0, 0], "sequence 0 cannot"),  # it had left before
        (ASKED, (2, 0, 0), [5, 0, 0], "sequence 0 cannot"),
        (ASKED, (2, 0, 0), None, "a step of 3 sequences"),
    ],
)
def test_servers_that_err_are_blamed(asked, before, left, why):
    with pytest.raises(ProtocolViolation, match=rf"server …server \(blocks 4:8\) .*{why}"):
        validate_left(HOP, asked, before, left)
