"""How a swarm organizes itself: what the placement of servers promises, on simulated swarms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.result import SimulationResult, compute_statistics, simulate
from benchmarks.simulation.scenario import SCENARIOS, Churn, Join, Leave, Lie, Machines, Scenario
from benchmarks.simulation.state import CoverageGap, GroundTruth, SimulatedDirectory
from swarm.data_structures import Mobility, ServerState, Span
from swarm.server.placement import initial_blocks as block_selection
from swarm.server.placement.best_move import take_snapshot
from swarm.server.placement.initial_blocks import block_throughputs
from tests.infos import server_info
from tests.slow import slow_except

SMALL = Scenario(
    "small",
    blocks=24,
    duration=2400,
    steady_from=1500,
    machines=Machines(blocks=(2, 6)),
    events=(Join(servers=120, over=60),),
)


def with_events(*events, **changes) -> Scenario:
    return replace(SMALL, events=(*SMALL.events, *events), **changes)


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_thousand_unequal_servers_come_near_the_optimum_and_then_stay(seed):
    scenario = replace(SCENARIOS["steady"], duration=2700)
    found = compute_statistics(simulate(scenario, seed))
    assert found.steady_lowest >= 0.95
    assert found.moves_per_server_hour < 0.1
    assert found.outages == ()


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_when_all_servers_of_a_stretch_leave_the_gap_is_closed_within_two_update_periods(seed):
    scenario = SCENARIOS["stretch-leaves"]
    outcome = simulate(scenario, seed)
    found = compute_statistics(outcome)
    (outage,) = found.outages
    assert outage.blocks == tuple(range(30, 38))
    assert outage.decided - outage.began <= scenario.update_period
    assert outage.ended - outage.began <= 2 * scenario.update_period
    assert found.steady_lowest >= 0.95


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_stretch_that_vanishes_without_a_word_is_held_again_soon_after_its_records_expired(seed):
    scenario = with_events(Leave(at=1200, blocks=(8, 12), silently=True))
    (outage,) = compute_statistics(simulate(scenario, seed)).outages
    expiry = scenario.record_periods * scenario.update_period
    assert expiry - scenario.update_period <= outage.ended - outage.began <= expiry + 2 * scenario.update_period


def test_churn_opens_no_gaps_and_costs_few_moves():
    found = compute_statistics(simulate(with_events(Churn(at=900, until=2400, hourly=0.1, silently=0.5))))
    assert found.outages == ()
    assert found.steady >= 0.85
    assert found.moves_per_server_hour < 1


def liar(seed: int) -> SimulationResult:
    return simulate(with_events(Lie(at=900, announced=1e9)), seed)


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_liar_does_not_empty_his_stretch(seed, monkeypatch):
    found = compute_statistics(liar(seed))
    monkeypatch.setattr(block_selection, "MAX_PLAUSIBLE_RATIO", 1e12)
    believed = compute_statistics(liar(seed))
    assert found.near_liars > 0.5
    assert believed.near_liars < found.near_liars


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    scenario = with_events(Churn(at=0, until=2400, hourly=0.5, silently=0.5))
    assert simulate(scenario, 1) == simulate(scenario, 1)
    assert simulate(scenario, 1).moves != simulate(scenario, 2).moves


def test_gaps_begin_with_the_last_holder_and_end_with_the_next():
    truth = GroundTruth(4)
    assert truth.all_gaps() == ()  # nobody has served yet: nothing was lost
    for row, span in enumerate((Span(0, 3), Span(1, 4))):
        truth.server_joined(row, 10.0)
        truth.start_serving(row, span, 5.0, False, now=1.0)
    assert truth.throughputs().tolist() == [5.0, 10.0, 10.0, 5.0]
    truth.stop_serving(0, Span(0, 3), now=2.0)
    assert truth.all_gaps() == (CoverageGap(0, 2.0, None),)
    truth.start_serving(2, Span(0, 1), 1.0, False, now=7.0)
    assert truth.all_gaps() == (CoverageGap(0, 2.0, 7.0),)
    assert truth.gaps_now == 0


def test_the_blocks_of_liars():
    truth = GroundTruth(4)
    truth.start_serving(0, Span(0, 4), 1.0, False, now=0.0)
    assert truth.near_liars().tolist() == []
    truth.start_serving(1, Span(2, 4), 3.0, True, now=0.0)
    assert truth.near_liars().tolist() == [4.0, 4.0]


def directory() -> SimulatedDirectory:
    return SimulatedDirectory(blocks=8, every=1.0, period=30.0, lifetime=75.0)


def announce(where: SimulatedDirectory, row: int, now: float, state: ServerState = ServerState.ONLINE) -> None:
    where.announce(row, server_info(row, row + 4, f"server{row}", throughput=row + 1.0, state=state), now)


def visible(where: SimulatedDirectory, now: float) -> int:
    where.advance(now)
    return where.visible


def test_a_change_is_seen_at_the_next_look_of_all():
    where = directory()
    announce(where, 0, now=2.5)
    assert [visible(where, now) for now in (2.5, 2.9, 3.0)] == [0, 0, 1]
    announce(where, 0, now=3.0, state=ServerState.OFFLINE)
    assert [visible(where, now) for now in (3.0, 3.9, 4.0)] == [1, 1, 0]


@pytest.mark.parametrize(("vanished", "gone"), [(10.0, 75.0), (29.0, 75.0), (31.0, 105.0)])
def test_a_server_that_vanishes_is_seen_until_its_last_renewal_expires(vanished, gone):
    where = directory()
    announce(where, 0, now=0.0)
    where.vanish(0, announced=0.0, now=vanished)
    assert [visible(where, now) for now in (1.0, gone - 0.1, gone)] == [1, 1, 0]


def test_servers_see_what_real_ones_make_of_the_same_announcements():
    where = directory()
    infos = [
        server_info(i % 5, i % 5 + 3, f"server{i:03}", throughput=1.0 + i, mobility=Mobility(i % 3)) for i in range(200)
    ]
    for row, info in enumerate(infos):
        where.announce(row, info, 0.0)
    where.advance(1.0)
    real = take_snapshot(infos, 8)
    ours = where.snapshot()
    assert ours.peers == real.peers
    for name in ("starts", "ends", "rates", "serving", "mobility"):
        assert (getattr(ours, name) == getattr(real, name)).all()
    assert where.throughputs().tolist() == block_throughputs(infos, 8)
