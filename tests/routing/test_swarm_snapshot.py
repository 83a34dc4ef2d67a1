from __future__ import annotations

from hypothesis import given, settings

from swarm.data_structures import ServerInfo
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.infos import server_info
from tests.routing.swarms import BLOCKS, snapshots


def announcing(*round_trips: tuple[str, float]) -> ServerInfo:
    return server_info(0, 2, "a", round_trips=round_trips)


def test_who_holds_a_block():
    snapshot = SwarmSnapshot((server_info(0, 2, "a"), server_info(1, 4, "b")))
    assert [snapshot.holders(block).tolist() for block in range(5)] == [
        [True, False],
        [True, True],
        [False, True],
        [False, True],
        [False, False],
    ]


def test_newer_measurements_keep_what_was_read_of_the_servers():
    snapshot = SwarmSnapshot((announcing(("b", 0.3)), server_info(2, 4, "b")), {"a": 0.1}, 0.2)
    assert snapshot.client_round_trips.tolist() == [0.1, 0.2]
    links = snapshot.links
    renewed = snapshot.with_round_trips({"b": 0.4})
    assert renewed.client_round_trips.tolist() == [0.2, 0.4]
    assert renewed.links is links
    assert snapshot.client_round_trips.tolist() == [0.1, 0.2]
    assert snapshot.with_round_trips({}) == SwarmSnapshot(snapshot.servers, {}, 0.2)


def links_of(snapshot: SwarmSnapshot) -> dict[tuple[int, int], float]:
    links = snapshot.links
    return dict(
        zip(zip(links.sources.tolist(), links.targets.tolist(), strict=True), links.seconds.tolist(), strict=True)
    )


def test_links_are_half_of_what_was_announced_of_servers_that_are_there():
    snapshot = SwarmSnapshot((announcing(("b", 0.3), ("gone", 0.1), ("a", 0.2), ("b", 0.4)), server_info(2, 4, "b")))
    assert links_of(snapshot) == {(0, 1): 0.2}
    assert links_of(SwarmSnapshot((announcing(("b", 0.3)),))) == {}


@given(snapshots())
@settings(deadline=None, max_examples=200)
def test_a_link_may_be_taken_where_one_server_can_leave_off_and_the_other_go_on(snapshot):
    links = snapshot.links
    for boundary in range(1, BLOCKS):
        for link, (source, target) in enumerate(zip(links.sources, links.targets, strict=True)):
            before, behind = snapshot.servers[source].span, snapshot.servers[target].span
            assert (link in links.at(boundary)) == (boundary - 1 in before and boundary in behind)
