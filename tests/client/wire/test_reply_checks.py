"""What a server may say about tokens that have left, and how long it may take at first."""

from __future__ import annotations

import pytest

from swarm.client.wire.reply_checks import AllowedExits, initial_estimate, validate_left
from swarm.data_structures import Span
from swarm.errors import ProtocolViolation
from tests.client.fakes import hop

HOP = hop(span=Span(4, 8))
ASKED = AllowedExits((1, 1, 0), (2, 5, 6, 8, 9))


def test_steps_whose_tokens_pass_all_blocks():
    for asked in (None, ASKED):
        assert validate_left(HOP, 0, asked, None) is None


def test_tokens_that_may_have_left_there():
    for left in [
        [0, 0, 0],
        [5, 6, 0],
        [0, 8, 0],  # in front of the next server's first block
        [2, 4, 0],  # before this server, by the word of those that were asked there
        [3, 5, 0],
    ]:
        assert validate_left(HOP, 0, ASKED, left) == tuple(left)


def test_servers_that_err_are_blamed():
    for asked, left, why in [
        (None, [5, 0, 0], "not asked for"),
        (None, [0, 0, 0], "not asked for"),
        (ASKED, [5, 0], "a step of 3 sequences"),
        (ASKED, [5, 0, 0, 0], "a step of 3 sequences"),
        (ASKED, [7, 0, 0], "sequence 0 cannot"),  # no such exit was asked for
        (ASKED, [0, 1, 0], "sequence 1 cannot"),  # the client computes this block itself
        (ASKED, [0, 9, 0], "sequence 1 cannot"),  # behind the span
        (ASKED, [0, 0, 5], "sequence 2 cannot"),  # it brings no token
        (ASKED, [0, 0, 2], "sequence 2 cannot"),
    ]:
        with pytest.raises(ProtocolViolation, match=rf"server …server \(blocks 4:8\) .*{why}"):
            validate_left(HOP, 1, asked, left)


def test_a_server_that_announces_quick_steps_gets_no_more_time_for_prompts():
    for at_once in [0.0, 1e-3, 1e4]:
        quick = hop(span=Span(4, 8), throughput=1e4, forward_throughput=at_once)
        assert initial_estimate(quick, 1.0, 60.0).timeout(512) < 5.0
