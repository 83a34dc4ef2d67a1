"""How the swarm organises itself: what issue and architecture promise, on simulated swarms."""

from __future__ import annotations

import msgspec
import pytest

from swarm.planning.simulation.result_statistics import compute_statistics
from swarm.planning.simulation.runner import SimulationResult, simulate
from swarm.planning.simulation.scenario import (
    ChurnEvent,
    JoinEvent,
    LeaveEvent,
    LieEvent,
    Scenario,
    ServerPopulation,
    find_scenario,
)
from swarm.server.placement import initial_blocks as block_selection
from tests.slow import slow_except

SMALL = Scenario(
    description="small",
    blocks=24,
    duration=2400,
    steady_from=1500,
    machines=ServerPopulation(blocks=(2, 6)),
    events=(JoinEvent(servers=120, over=60),),
    route_every=300,
)


def with_events(*events, **changes) -> Scenario:
    return msgspec.structs.replace(SMALL, events=(*SMALL.events, *events), **changes)


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_thousand_unequal_servers_come_near_the_optimum_and_then_stay(seed):
    scenario = msgspec.structs.replace(find_scenario("steady"), duration=2700)
    found = compute_statistics(simulate(scenario, seed))
    assert found.steady_lowest >= 0.95
    assert found.moves_per_server_hour < 0.1
    assert found.outages == ()


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_when_all_servers_of_a_stretch_leave_the_gap_is_closed_within_two_update_periods(seed):
    scenario = msgspec.structs.replace(find_scenario("stretch-leaves"), route_every=0)
    outcome = simulate(scenario, seed)
    found = compute_statistics(outcome)
    (outage,) = found.outages
    assert outage.blocks == tuple(range(30, 38))
    assert outage.decided - outage.began <= scenario.update_period
    assert outage.ended - outage.began <= 2 * scenario.update_period
    assert found.steady_lowest >= 0.95


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_stretch_that_vanishes_without_a_word_is_held_again_soon_after_its_records_expired(seed):
    scenario = with_events(LeaveEvent(at=1200, blocks=(8, 12), silently=True))
    (outage,) = compute_statistics(simulate(scenario, seed)).outages
    expiry = scenario.record_periods * scenario.update_period
    assert expiry - scenario.update_period <= outage.ended - outage.began <= expiry + 2 * scenario.update_period


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_gaps_are_closed_by_the_others_though_half_of_all_servers_are_pinned(seed):
    scenario = with_events(LeaveEvent(at=1200, blocks=(8, 12)), machines=ServerPopulation(blocks=(2, 6), pinned=0.5))
    *_, outage = compute_statistics(simulate(scenario, seed)).outages
    assert outage.began == 1200
    assert outage.ended - outage.began <= 2 * scenario.update_period


def test_churn_opens_no_gaps_and_costs_few_moves():
    found = compute_statistics(simulate(with_events(ChurnEvent(at=900, until=2400, hourly=0.1, silently=0.5))))
    assert found.outages == ()
    assert found.steady >= 0.85
    assert found.moves_per_server_hour < 1


def liar(seed: int) -> SimulationResult:
    return simulate(with_events(LieEvent(at=900, announced=1e9)), seed)


@pytest.mark.parametrize("seed", slow_except(range(2), 0))
def test_a_liar_does_not_empty_his_stretch(seed, monkeypatch):
    found = compute_statistics(liar(seed))
    monkeypatch.setattr(block_selection, "MAX_PLAUSIBLE_RATIO", 1e12)
    believed = compute_statistics(liar(seed))
    assert found.near_liars > 0.5
    assert believed.near_liars < found.near_liars


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    scenario = with_events(ChurnEvent(at=0, until=2400, hourly=0.5, silently=0.5))
    assert simulate(scenario, 1) == simulate(scenario, 1)
    assert simulate(scenario, 1).moves != simulate(scenario, 2).moves


def test_clients_find_routes_through_servers_that_are_there():
    outcome = simulate(SMALL)
    assert len(outcome.routes) == 8
    assert all(route.hops >= 4 and route.lost == 0 and route.seconds > 0 for route in outcome.routes)


def test_nobody_there():
    outcome = simulate(msgspec.structs.replace(SMALL, events=()))
    assert all(sample.bottleneck == sample.optimum == 0 for sample in outcome.samples)
    assert all(route.hops == 0 for route in outcome.routes)
    assert compute_statistics(outcome).steady == 0


def test_too_few_servers_for_all_blocks_do_not_move_about():
    outcome = simulate(msgspec.structs.replace(SMALL, events=(JoinEvent(servers=3, over=600),)))
    assert outcome.samples[-1].gaps > 0
    assert len(outcome.moves) <= 3
