from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.data_structures import Mobility, ServerInfo, ServerState, Span
from swarm.server.placement.best_move import take_snapshot
from swarm.server.placement.initial_blocks import block_throughputs
from swarm.server.placement.move_decision import MoveHistory, MovePlan, MovePolicy, decide_move, plan_moves
from tests.infos import server_info

POLICY = MovePolicy()


@st.composite
def swarms(
    draw: st.DrawFn, states=(ServerState.ONLINE,), rates=(0.2, 1.0, 1.0, 3.0, 20.0)
) -> tuple[list[ServerInfo], int]:
    blocks = draw(st.integers(1, 12))
    servers = []
    for index in range(draw(st.integers(0, 14))):
        length = draw(st.integers(1, blocks))
        start = draw(st.integers(0, blocks - length))
        rate = draw(st.sampled_from([0.2, 1.0, 1.0, 3.0, 20.0]) | st.floats(0.01, 100))
        state = draw(st.sampled_from(states))
        servers.append(server_info(start, start + length, f"peer{index}", throughput=rate * length, state=state))
    return servers, blocks


everything = swarms(states=(ServerState.ONLINE, ServerState.ONLINE, ServerState.JOINING, ServerState.OFFLINE))


def plan(servers: list[ServerInfo], blocks: int, policy: MovePolicy = POLICY) -> MovePlan:
    return plan_moves(take_snapshot(servers, blocks), policy)


def applied(servers: list[ServerInfo], planned: MovePlan) -> list[ServerInfo]:
    new = {move.peer_id: move.new for move in planned.moves}
    return [replace(server, span=new.get(server.peer_id, server.span)) for server in servers]


def holders(servers: list[ServerInfo], blocks: int) -> list[int]:
    counts = Counter(b for s in servers if s.state is not ServerState.OFFLINE for b in range(s.span.start, s.span.end))
    return [counts[block] for block in range(blocks)]


@given(everything)
@settings(deadline=None)
def test_who_moves_is_online_and_goes_to_other_blocks_inside_the_model(swarm):
    servers, blocks = swarm
    known = {server.peer_id: server for server in servers}
    moves = plan(servers, blocks).moves
    assert len({move.peer_id for move in moves}) == len(moves)
    for move in moves:
        assert known[move.peer_id].state is ServerState.ONLINE
        assert move.old == known[move.peer_id].span != move.new
        assert move.new.length == move.old.length
        assert move.new.end <= blocks


@given(everything)
@settings(deadline=None)
def test_a_plan_never_opens_a_gap_nor_lowers_the_minimum(swarm):
    servers, blocks = swarm
    before, after = holders(servers, blocks), holders(applied(servers, plan(servers, blocks)), blocks)
    assert after.count(0) <= before.count(0)
    new = applied(servers, plan(servers, blocks))
    assert min(block_throughputs(new, blocks)) >= min(block_throughputs(servers, blocks))


@given(everything)
@settings(deadline=None)
def test_while_every_block_is_held_each_is_served_during_the_moves_too(swarm):
    servers, blocks = swarm
    if min(holders(servers, blocks)) == 0:
        return
    moving = {move.peer_id for move in plan(servers, blocks).moves}
    left_by = {b for s in servers if s.peer_id in moving for b in range(s.span.start, s.span.end)}
    staying = [s for s in servers if s.state is ServerState.ONLINE and s.peer_id not in moving]
    assert all(holders(staying, blocks)[block] >= 1 for block in left_by)


@given(swarms(), st.floats(0, 1))
@settings(deadline=None)
def test_no_move_without_enough_gain(swarm, min_gain):
    servers, blocks = swarm
    policy = replace(POLICY, min_gain=min_gain)
    planned = plan(servers, blocks, policy)
    if planned.moves and min(holders(servers, blocks)) > 0:
        before, after = (min(block_throughputs(s, blocks)) for s in (servers, applied(servers, planned)))
        assert after > before
        assert after >= before * (1 + min_gain) * (1 - 1e-9)  # sums in another order


def fewest_gaps(servers: list[ServerInfo], blocks: int) -> int:
    """Gaps that the best single move leaves."""
    best = holders(servers, blocks).count(0)
    for index, server in enumerate(servers):
        for start in range(blocks - server.span.length + 1) if server.state is ServerState.ONLINE else ():
            moved = replace(server, span=Span(start, start + server.span.length))
            best = min(best, holders([*servers[:index], moved, *servers[index + 1 :]], blocks).count(0))
    return best


GREEDY_TRAP = [
    server_info(1, 2, "loading", throughput=0.2, state=ServerState.JOINING),
    server_info(2, 3, "stays", throughput=0.5),
    server_info(1, 3, "closes one gap or two", throughput=2.0),
]


@given(everything)
@example((GREEDY_TRAP, 5))
@settings(deadline=None)
def test_gaps_are_closed_whenever_some_server_can_close_them(swarm):
    servers, blocks = swarm
    gaps = holders(servers, blocks).count(0)
    closing = [move for move in plan(servers, blocks).moves if move.closes_gap]
    assert bool(closing) == (fewest_gaps(servers, blocks) < gaps)
    after = applied(servers, plan(servers, blocks, replace(POLICY, max_moves=100)))
    assert holders(after, blocks).count(0) == 0 or fewest_gaps(after, blocks) == holders(after, blocks).count(0)


@given(everything)
@settings(deadline=None)
def test_everybody_makes_the_same_plan(swarm):
    servers, blocks = swarm
    assert plan(servers, blocks) == plan(servers[::-1], blocks)


def uneven() -> list[ServerInfo]:
    """Three servers hold 0:4, one holds 4:8: one of the three should go over."""
    return [server_info(0, 4, f"a{i}", throughput=4.0) for i in range(3)] + [server_info(4, 8, "b", throughput=4.0)]


def decide(servers, me, now=1000.0, history=MoveHistory(), policy=POLICY, **options):  # noqa: B008
    return decide_move(servers, me, 8, now, history, policy, **options)


def test_the_best_mover_goes_and_the_others_let_it():
    decisions = {server.peer_id: decide(uneven(), server.peer_id).span for server in uneven()}
    assert decisions == {"a0": Span(4, 8), "a1": None, "a2": None, "b": None}
    assert "…a0" in decide(uneven(), "a1").reason


def test_a_mover_that_is_loading_counts_where_it_goes():
    servers = [replace(uneven()[0], span=Span(4, 8), state=ServerState.JOINING), *uneven()[1:]]
    assert all(decide(servers, server.peer_id).span is None for server in servers)


def test_whoever_does_not_move_in_time_is_planned_without():
    history = decide(uneven(), "a1", now=0.0).history
    waiting = decide(uneven(), "a1", now=POLICY.overdue_after - 1, history=history)
    assert waiting.span is None
    assert decide(uneven(), "a1", now=POLICY.overdue_after + 1, history=waiting.history).span == Span(4, 8)


def test_a_server_that_has_moved_stays_for_a_while():
    history = MoveHistory(moved_at=1000.0)
    assert decide(uneven(), "a0", now=1000.0 + POLICY.cool_down - 1, history=history).span is None
    decision = decide(uneven(), "a0", now=1000.0 + POLICY.cool_down, history=history)
    assert decision.span == Span(4, 8)
    assert decision.history.moved_at == 1000.0 + POLICY.cool_down


def test_there_is_no_cool_down_against_a_gap():
    decision = decide(uneven()[:3], "a0", now=1001.0, history=MoveHistory(moved_at=1000.0))
    assert decision.span == Span(4, 8)
    assert "no server holds blocks 4:8" in decision.reason


def test_a_gain_that_does_not_last_is_not_worth_the_loading():
    # x can raise 6:8 from 1 to 3, and 0:2 is then the weakest with 1.5; but 4:6 has only 0.3 while x loads.
    x = server_info(0, 6, "x", throughput=6 * 2.0)
    others = [(0, 4, "a", 1.5), (4, 6, "b", 0.3), (6, 8, "c", 1.0)]
    servers = [x, *(server_info(start, end, i, throughput=(end - start) * rate) for start, end, i, rate in others)]
    view, immovable = take_snapshot(servers, 8), frozenset("abc")
    (move,) = plan_moves(view, replace(POLICY, load_seconds=60.0, horizon=90.0), immovable).moves
    assert move.new == Span(2, 8)
    planned = plan_moves(view, replace(POLICY, load_seconds=60.0, horizon=80.0), immovable)
    assert planned.moves == ()
    assert "loading" in planned.reason


LIAR = server_info(0, 4, "liar", throughput=1e9)


def test_a_liar_does_not_keep_others_away_from_his_blocks():
    servers = [*(server_info(0, 4, f"a{i:02}", throughput=4.0) for i in range(10)), LIAR]
    servers += [server_info(4, 8, f"b{i:02}", throughput=4.0) for i in range(10)]
    honest = block_throughputs([s for s in applied(servers, plan(servers, 8)) if s is not LIAR], 8)
    assert min(honest) >= 8


def test_a_liar_is_never_left_alone_with_his_blocks():
    servers = [LIAR, server_info(0, 4, "a", throughput=4.0)]
    servers += [server_info(4, 8, f"b{i}", throughput=0.4) for i in range(3)]
    assert all(move.peer_id != "a" for move in plan(servers, 8).moves)


def with_mobility(servers: list[ServerInfo], **mobility: Mobility) -> list[ServerInfo]:
    return [replace(server, mobility=mobility.get(server.peer_id, Mobility.FREE)) for server in servers]


def test_pinned_and_cooling_servers_are_not_waited_for():
    servers = with_mobility(uneven(), a0=Mobility.PINNED, a1=Mobility.COOLING)
    assert [move.peer_id for move in plan(servers, 8).moves] == ["a2"]


def large_swarm(servers: int, seed: int) -> list[ServerInfo]:
    """Unequal servers that all sit in the first half of the model."""
    draw = random.Random(seed)
    result = []
    for index in range(servers):
        length = draw.randint(2, 8)
        start = draw.randint(0, 20 - length)
        rate = draw.lognormvariate(0, 0.5)
        result.append(server_info(start, start + length, f"peer{index:04}", throughput=rate * length))
    return result


def test_a_large_swarm_spreads_out_evenly():
    for seed in range(3):
        servers = large_swarm(600, seed)
        for _ in range(60):
            planned = plan(servers, 40)
            if not planned.moves:
                break
            servers = applied(servers, planned)
        assert not planned.moves
        throughputs = block_throughputs(servers, 40)
        assert min(throughputs) >= 0.95 * sum(throughputs) / 40
