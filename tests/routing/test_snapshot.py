from __future__ import annotations

from swarm.data_structures import ServerInfo
from swarm.routing.snapshot import Snapshot
from tests.infos import server_info


def announcing(*round_trips: tuple[str, float]) -> ServerInfo:
    return server_info(0, 2, "a", round_trips=round_trips)


def test_who_holds_a_block():
    snapshot = Snapshot((server_info(0, 2, "a"), server_info(1, 4, "b")))
    assert [snapshot.holders(block).tolist() for block in range(5)] == [
        [True, False],
        [True, True],
        [False, True],
        [False, True],
        [False, False],
    ]


def test_round_trips_that_nobody_measured_are_assumed():
    snapshot = Snapshot((server_info(0, 2, "a"), server_info(0, 2, "b")), {"b": 0.5, "gone": 0.7}, 0.2)
    assert snapshot.client_round_trips.tolist() == [0.2, 0.5]
    assert snapshot.client_round_trip("gone") == 0.7


def test_neighbours_are_numbered_and_strangers_are_not():
    snapshot = Snapshot((announcing(("b", 0.3), ("gone", 0.1)), server_info(2, 4, "b")))
    assert snapshot.neighbours(0).servers.tolist() == [1, -1]
    assert snapshot.neighbours(0).seconds.tolist() == [0.3, 0.1]
    assert snapshot.neighbours(1).servers.tolist() == []
    assert snapshot.neighbours(0) is snapshot.neighbours(0)


def test_an_empty_swarm():
    snapshot = Snapshot(())
    assert len(snapshot) == 0
    assert snapshot.holders(0).tolist() == []
