from __future__ import annotations

import pytest

from swarm.data_structures import Mobility, ServerState
from swarm.dht.announcer import LIFETIME_PERIODS
from swarm.planning.simulation.scenario import Scenario
from swarm.planning.simulation.simulated_directory import SimulatedDirectory
from swarm.server.placement.best_move import take_snapshot
from swarm.server.placement.initial_blocks import block_throughputs
from tests.infos import server_info


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


def test_records_live_as_long_as_real_ones():
    scenario = Scenario(description="", blocks=1, duration=1, events=())
    assert scenario.record_periods == LIFETIME_PERIODS


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
    for name in ("starts", "ends", "rates", "serving", "mobility", "lengths", "rates_after"):
        assert (getattr(ours, name) == getattr(real, name)).all()
    assert where.throughputs().tolist() == block_throughputs(infos, 8)
