"""What comes of several sequences, and what is told of a session on its way."""

from __future__ import annotations

import pytest

from swarm.client.events import BlocksMissing, HopLost, PeerAvoided, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.gateway.answering import detail, joined
from swarm.gateway.generation import Delta, End
from swarm.gateway.tool_calls import ToolCall
from swarm.models.decoding import Chosen
from tests.infos import server_info


def test_pieces_that_wait_together_become_one():
    call = ToolCall("f", "{}")
    waiting = [
        (0, Delta("a", (), (Chosen(1),))),
        (0, Delta("b", (call,), (Chosen(2),))),
        (1, Delta("x")),
        (0, Delta("c")),
        (0, End("stop", 3)),
    ]
    assert joined(waiting) == [
        (0, Delta("ab", (call,), (Chosen(1), Chosen(2)))),
        (1, Delta("x")),
        (0, Delta("c")),
        (0, End("stop", 3)),
    ]


ROUTE = Route((Hop(server_info(0, 4, "abcdefgh", name="ann"), Span(0, 4)),))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (RouteTaken(ROUTE), {"kind": "route", "hops": [{"blocks": "0:4", "peer": "…cdefgh", "name": "ann"}]}),
        (HopLost("abcdefgh", Span(0, 4), "peer_lost"),
         {"kind": "lost", "peer": "…cdefgh", "blocks": "0:4", "reason": "peer_lost"}),
        (BlocksMissing((0, 1, 5)), {"kind": "missing", "blocks": "0:2, 5:6"}),
        (Recovered(0.06789), {"kind": "recovered", "seconds": 0.068}),
        (Replayed(Span(0, 4), 9), None),
        (PeerAvoided("a", "fault", 1.0), None),
        (Delta("a"), None),
    ],
)  # fmt: skip
def test_details(event, told):
    assert detail(event) == told
