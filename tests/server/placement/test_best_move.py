"""The fast search for the best way against looking at every server and every window."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.server.placement import best_move as placement
from swarm.server.placement.best_move import PlacementState, take_snapshot
from swarm.server.placement.initial_blocks import believed_throughputs
from tests.infos import server_info
from tests.server.placement.test_move_decision import swarms


def all_ways(view, block):
    """(server, first block, throughputs after) for each way onto `block`, believed rates."""
    for who in range(len(view.peers)):
        start, end = int(view.starts[who]), int(view.ends[who])
        if start <= block < end:
            continue
        for new in range(max(0, block - (end - start) + 1), min(block, view.blocks - (end - start)) + 1):
            starts, ends = view.starts.copy(), view.ends.copy()
            starts[who], ends[who] = new, new + end - start
            yield who, new, believed_throughputs(starts, ends, view.rates, view.blocks)


@given(swarms())
@settings(deadline=None)
def test_a_raising_way_is_found_whenever_there_is_one_and_raises(swarm):
    servers, blocks = swarm
    view = take_snapshot(servers, blocks)
    before = believed_throughputs(view.starts, view.ends, view.rates, blocks)
    block = int(before.argmin())
    margin = 1e-9 * (1 + before[block])
    found = PlacementState(view).best_raising_move(0.03)
    after = {(who, new): throughputs for who, new, throughputs in all_ways(view, block)}
    if found is not None:
        weakest = after[found.server, found.start]
        assert weakest[block] > before[block]
        assert np.all(weakest[weakest < before - margin] > before[block] - margin)
    elif min(before) > 0:
        for (who, _), throughputs in after.items():
            held = range(view.starts[who], view.ends[who])
            spare = all(np.sum((view.starts <= b) & (b < view.ends)) >= 2 for b in held)
            lowered = throughputs[throughputs < before - margin]
            if spare and np.all(lowered > before[block] + margin):
                limit = placement.plausible_rate(view.rates)
                # Left alone only with servers that are not plausible: then it has to stay.
                assert any(view.rates > limit)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_minima_of_ranges(values, data):
    starts, ends = [], []
    for _ in range(5):
        start = data.draw(st.integers(0, len(values)))
        starts.append(start)
        ends.append(data.draw(st.integers(start, len(values))))
    found = placement._RangeMinimum(np.array(values))(np.array(starts), np.array(ends))
    expected = [min(values[start:end], default=np.inf) for start, end in zip(starts, ends, strict=True)]
    assert found.tolist() == expected


def test_in_a_large_swarm_the_few_that_are_looked_at_closely_are_those_that_are_likely(monkeypatch):
    """Every way onto the weakest block is allowed here, so the few and all have to agree."""
    servers = [server_info(0, 4, f"peer{i:03}", throughput=4.0 + i / 1000) for i in range(300)]
    servers.append(server_info(4, 8, "z", throughput=4.0))
    view = take_snapshot(servers, 8)
    few = PlacementState(view).best_raising_move(0.03)
    monkeypatch.setattr(placement, "MAX_CANDIDATES", 10_000)
    assert few == PlacementState(view).best_raising_move(0.03)
