from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.server.placement.initial_blocks import block_throughputs, weakest_window


def server(start: int, end: int, throughput: float = 1.0, state: ServerState = ServerState.ONLINE) -> ServerInfo:
    return ServerInfo(
        peer_id="peer",
        span=Span(start, end),
        state=state,
        throughput=throughput,
        cache_tokens_free=0,
        revision="main",
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version="1",
    )


throughputs = st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]) | st.floats(0, 1e6), min_size=1, max_size=12)


@given(throughputs, st.data())
@settings(deadline=None)
def test_the_chosen_window_is_never_beaten(values, data):
    length = data.draw(st.integers(1, len(values)))
    chosen = weakest_window(values, length)
    assert chosen.length == length
    assert chosen.end <= len(values)
    ours = sorted(values[chosen.start : chosen.end])
    for start in range(len(values) - length + 1):
        other = sorted(values[start : start + length])
        assert ours < other or (ours == other and chosen.start <= start)


def test_a_gap_counts_more_than_many_weak_blocks():
    assert weakest_window([0.1, 0.1, 0.1, 9.0, 0.0, 9.0], 3) == Span(2, 5)


@given(st.integers(2, 12), st.data())
@settings(deadline=None)
def test_two_joiners_do_not_take_the_same_blocks(blocks, data):
    length = data.draw(st.integers(1, blocks // 2))
    first = weakest_window(block_throughputs([], blocks), length)
    joining = server(first.start, first.end, state=ServerState.JOINING)
    second = weakest_window(block_throughputs([joining], blocks), length)
    assert not set(range(first.start, first.end)) & set(range(second.start, second.end))


@given(st.integers(1, 12), st.data())
@settings(deadline=None)
def test_joiners_one_after_the_other_leave_no_gap(blocks, data):
    servers: list[ServerInfo] = []
    lengths = data.draw(st.lists(st.integers(1, blocks), min_size=1, max_size=blocks))
    for length in lengths:
        gaps = block_throughputs(servers, blocks).count(0.0)
        taken = weakest_window(block_throughputs(servers, blocks), length)
        servers.append(server(taken.start, taken.end))
        left = block_throughputs(servers, blocks).count(0.0)
        assert left == 0 or left < gaps


def test_a_servers_throughput_is_shared_by_its_blocks():
    assert block_throughputs([server(0, 2, 10.0), server(1, 2, 3.0)], 4) == [5.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.ONLINE])
def test_a_server_beyond_the_end_of_the_model_counts_where_it_can(state):
    assert block_throughputs([server(1, 5, 4.0, state)], 2) == [0.0, 1.0]


def test_only_windows_that_can_be_served():
    values = [0.1, 0.1, 0.1, 9.0, 0.0, 9.0]
    assert weakest_window(values, 3, [Span(0, 3), Span(1, 4)]) == Span(0, 3)
