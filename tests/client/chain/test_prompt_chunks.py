"""Into how many chunks prompts are cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.prompt_chunks import (
    DEFAULT_OVERHEAD_TOKENS,
    MAX_CHUNK_TOKENS,
    MAX_OVERHEAD_TOKENS,
    MAX_TOKENS_IN_FLIGHT,
    MIN_CHUNK_TOKENS,
    MIN_OVERHEAD_TOKENS,
    chunk_overhead,
    chunk_slots,
    max_chunks_in_flight,
)
from swarm.data_structures import ServerInfo
from tests.infos import server_info


def servers(count: int, forward_throughput: float = 0.0) -> list[ServerInfo]:
    return [
        server_info(n, n + 1, str(n), throughput=100.0, forward_throughput=forward_throughput) for n in range(count)
    ]


def turns(slots: int, size: int, hops: int, cost: float, carry: float = 0.0) -> float:
    """What a pipeline of servers and the links between them takes, in tokens of one server's."""
    server, link = size + cost, size * carry
    return hops * server + (hops + 1) * link + (math.ceil(slots / size) - 1) * max(server, link)


@pytest.mark.parametrize(
    ("slots", "rows", "hops", "expected"),
    [
        (1, 1, 3, 1),
        (MIN_CHUNK_TOKENS, 1, 3, MIN_CHUNK_TOKENS),
        (512, 1, 1, 512),
        (512, 1, 3, 64),
        (512, 8, 3, 23),
        (8192, 1, 1, MAX_CHUNK_TOKENS),
        (8192, 1, 3, 256),
    ],
)
def test_examples(slots, rows, hops, expected):
    assert chunk_slots(slots, rows, servers(hops)) == expected


def test_where_the_first_chunk_goes_alone_it_has_to_pay_twice():
    """A few candidates of speculative decoding, after others were rejected, are one step; a long prompt is not."""
    assert chunk_slots(64, 1, servers(3)) == 32
    assert chunk_slots(64, 1, servers(3), first_alone=True) == 64
    assert 32 < chunk_slots(512, 1, servers(3), first_alone=True) < 64
    assert chunk_slots(600, 1, servers(1), first_alone=True) == 300


def test_thin_links_get_shorter_chunks():
    fast, thin, thinner = (
        chunk_slots(2048, 1, [replace(one, network_throughput=rate) for one in servers(3, 2000.0)])
        for rate in (1e6, 1500.0, 100.0)
    )
    assert fast > thin > thinner == MIN_CHUNK_TOKENS
    assert chunk_slots(2048, 1, servers(3, 2000.0)) >= fast


def test_servers_that_lose_much_with_each_chunk_get_fewer():
    quick, slow = (chunk_slots(2048, 1, servers(3, rate)) for rate in (400.0, 6400.0))
    assert quick < slow <= MAX_CHUNK_TOKENS


def test_what_a_chunk_costs_is_what_servers_say_within_bounds():
    assert chunk_overhead(servers(3)) == DEFAULT_OVERHEAD_TOKENS == chunk_overhead([])
    assert chunk_overhead(servers(3, 2000.0)) == 20.0
    assert chunk_overhead([*servers(2, 2000.0), *servers(1, 9e9)]) == 20.0  # one that boasts changes nothing
    assert chunk_overhead(servers(1, 1e9)) == MAX_OVERHEAD_TOKENS
    assert chunk_overhead(servers(1, 101.0)) == MIN_OVERHEAD_TOKENS
    assert chunk_overhead(servers(1, 100.0)) == DEFAULT_OVERHEAD_TOKENS


@given(st.integers(1, 8192), st.integers(1, 64), st.integers(0, 12), st.sampled_from([0.0, 500.0, 4000.0]))
def test_bounds(slots, rows, hops, rate):
    size = chunk_slots(slots, rows, servers(hops, rate))
    assert 1 <= size <= slots
    assert size * rows <= MAX_CHUNK_TOKENS + rows
    chunks = math.ceil(slots / size)
    assert chunks == 1 or slots * rows / chunks >= MIN_CHUNK_TOKENS / 2
    assert chunks * size - slots < size, "no chunk is empty"


@given(st.integers(256, 8192), st.integers(1, 8), st.sampled_from([0.0, 0.3, 1.0, 3.0, 20.0]))
def test_nothing_else_is_much_quicker(slots, hops, carry):
    chain = [replace(one, network_throughput=2000.0 / carry if carry else 0.0) for one in servers(hops, 2000.0)]
    size, cost = chunk_slots(slots, 1, chain), chunk_overhead(chain)
    best = min(turns(slots, other, hops, cost, carry) for other in range(MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS + 1))
    assert turns(slots, size, hops, cost, carry) <= 1.15 * best


@given(st.integers(1, 8192))
def test_a_window_keeps_a_server_busy_and_does_not_flood_it(tokens):
    assert max_chunks_in_flight(tokens) == 2 or 2 < max_chunks_in_flight(tokens) <= MAX_TOKENS_IN_FLIGHT / tokens
