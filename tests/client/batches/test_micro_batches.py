"""Into which micro-batches rows are put."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from swarm.client.batches.passes import split_into_micro_batches
from swarm.client.chain.prompt_chunks import MAX_CHUNK_TOKENS
from swarm.data_structures import ServerInfo
from tests.infos import server_info


def servers(hops: int, forward: float = 0.0, network: float = 0.0) -> list[ServerInfo]:
    return [
        server_info(n, n + 1, throughput=100.0, forward_throughput=forward, network_throughput=network)
        for n in range(hops)
    ]


def test_examples():
    for counts, hops, sizes in [
        ([], 3, []),
        ([5], 3, [1]),
        ([64] * 8, 1, [8]),
        ([64] * 8, 3, [1] * 8),
        ([64] * 32, 3, [2] * 16),
        ([8] * 8, 3, [4, 4]),
        ([2048] * 2, 1, [1, 1]),
        ([1, 1, 500, 500, 1, 1], 2, [2, 1, 1, 2]),
    ]:
        assert [len(rows) for rows in split_into_micro_batches(counts, servers(hops))] == sizes


def test_slow_links_for_gradients_mean_fewer_micro_batches():
    counts = [64] * 8
    alone = split_into_micro_batches(counts, servers(3, 1000.0, 1000.0))
    assert len(split_into_micro_batches(counts, servers(3, 1000.0, 1000.0), 100.0)) < len(alone)
    assert len(split_into_micro_batches(counts, servers(3, 1000.0, 1e6), 100.0)) == len(alone)
    assert len(split_into_micro_batches(counts, servers(3), 100.0)) == 8  # nothing is known of the links


@example([1], 2, 1.0, 2.3e-309, 0.0)  # a link so slow that its price is no number any more
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=60),
    st.integers(1, 8),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 1e4),
)
def test_micro_batches_hold_every_sequence_once_and_are_about_equal(counts, hops, forward, network, gradients):
    groups = split_into_micro_batches(counts, servers(hops, forward, network), gradients)
    assert list(itertools.chain(*groups)) == list(range(len(counts)))
    assert all(groups)
    for group in groups:
        assert sum(counts[row] for row in group) < MAX_CHUNK_TOKENS + max(counts)
