from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import MissingBlocks
from swarm.routing.batch_split import BatchShare, split_batch
from swarm.routing.cost_model import RouteRequirements, route_seconds
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.infos import server_info
from tests.routing.swarms import assert_covers, demands, missing_blocks, snapshots, spans

WANTED = Span(0, 4)


def split(servers, token_counts, **options) -> tuple[BatchShare, ...]:
    snapshot = SwarmSnapshot(tuple(servers), {server.peer_id: 0.01 for server in servers})
    return split_batch(snapshot, WANTED, token_counts, random.Random(0), **options)


def sequences_by_server(shares) -> dict[str, int]:
    return {share.route.hops[0].server.peer_id: len(share.sequences) for share in shares}


@given(
    snapshots(),
    spans(),
    demands(),
    st.lists(st.integers(1, 2000), max_size=12),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=150)
def test_every_sequence_takes_one_route_over_all_blocks(snapshot, wanted, demand, token_counts, seed, most):
    def once():
        return split_batch(snapshot, wanted, token_counts, random.Random(seed), demand, most)

    missing = missing_blocks(snapshot, wanted, demand)
    if missing and token_counts:
        with pytest.raises(MissingBlocks) as raised:
            once()
        assert raised.value.blocks == missing
        return
    shares = once()
    assert sorted(sequence for share in shares for sequence in share.sequences) == list(range(len(token_counts)))
    assert len(shares) <= most
    assert shares == once()
    for share in shares:
        assert list(share.sequences) == sorted(share.sequences) != []
        assert_covers(share.route, wanted, snapshot, demand)


def test_sequences_go_to_servers_in_proportion_to_their_throughput():
    servers = [
        server_info(0, 4, "one", throughput=100.0, forward_throughput=100.0),
        server_info(0, 4, "three", throughput=100.0, forward_throughput=300.0),
        server_info(0, 4, "four", throughput=100.0, forward_throughput=400.0),
    ]
    assert sequences_by_server(split(servers, [50] * 80)) == {"one": 10, "three": 30, "four": 40}


def test_all_shares_end_at_about_the_same_time():
    servers = [
        server_info(0, 4, f"{n}", throughput=100.0, forward_throughput=100.0 * (n + 1), queue_delay=n / 2)
        for n in range(5)
    ]
    token_counts = [20 + 40 * (sequence % 7) % 41 for sequence in range(100)]
    shares = split(servers, token_counts)
    snapshot = SwarmSnapshot(tuple(servers), {server.peer_id: 0.01 for server in servers})
    assert len(shares) > 3
    ends = [
        route_seconds(snapshot, share.route, RouteRequirements(tokens=sum(token_counts[i] for i in share.sequences)))
        for share in shares
    ]
    assert max(ends) - min(ends) < 0.05 * max(ends)


def test_a_small_batch_takes_one_route():
    servers = [server_info(0, 4, f"{n}", throughput=1000.0, forward_throughput=1e5) for n in range(4)]
    assert len(split(servers, [5, 5, 5])) == 1
    assert len(split(servers, [10_000] * 8)) == 4


def test_nothing_is_split_where_all_would_wait_for_one_server():
    servers = [
        server_info(0, 3, "narrow", throughput=10.0),
        *(server_info(3, 4, f"{n}", throughput=1e4) for n in range(4)),
    ]
    assert len(split(servers, [100] * 20)) == 1


def test_servers_that_are_equally_good_are_chosen_by_chance():
    servers = tuple(server_info(0, 4, f"{n}", throughput=1000.0) for n in range(10))
    first = {
        split_batch(SwarmSnapshot(servers), WANTED, [1], random.Random(seed))[0].route.hops[0].server.peer_id
        for seed in range(60)
    }
    assert len(first) > 5
