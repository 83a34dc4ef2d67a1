"""What clients are told of a session's route."""

from __future__ import annotations

import pytest

from swarm.client.routes.events import BlocksMissing, HopLost, PeerAvoided, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.generation.route_details import route_detail
from swarm.generation.sequence_output import SequenceDelta
from tests.infos import server_info

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
        (SequenceDelta("a"), None),
    ],
)  # fmt: skip
def test_details(event, told):
    assert route_detail(event) == told
