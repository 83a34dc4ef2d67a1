from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.monitor.history import (
    MAX_MODELS,
    MAX_POINTS,
    POINT_INTERVAL_S,
    RETENTION_S,
    HistoryPoint,
    SwarmHistory,
)
from swarm.monitor.swarm_poller import PollResult, build_swarm_view
from swarm.monitor.swarm_view import SwarmView
from tests.infos import server_info
from tests.monitor.sources import found

NOW = 1_700_000_000.0 - 1_700_000_000.0 % POINT_INTERVAL_S


def poll(time: float, servers: int = 1, covered: int = 4, name: str = "org/model") -> SwarmView:
    infos = [server_info(0, covered, f"peer{n}", throughput=4.0) for n in range(servers)] if covered else []
    return build_swarm_view(PollResult((found(4, *infos, name=name),)), {}, (), time, 10.0)


def points(history: SwarmHistory, name: str = "org/model") -> list[HistoryPoint]:
    return history.models[name].points


def test_a_minute_is_as_bad_as_its_worst_look():
    history = SwarmHistory()
    for second, (servers, covered) in enumerate([(3, 4), (1, 2), (2, 4)]):
        history.record(poll(NOW + second, servers, covered))
    history.record(poll(NOW + POINT_INTERVAL_S, 2))
    assert points(history) == [HistoryPoint(NOW, 1, 0.0, 2), HistoryPoint(NOW + POINT_INTERVAL_S, 2, 2.0, 4)]


@given(st.lists(st.floats(0, 3 * RETENTION_S), max_size=60))
def test_points_are_in_order_one_a_minute_and_not_too_old(offsets):
    history = SwarmHistory()
    for offset in sorted(offsets):
        history.record(poll(NOW + offset))
    for track in history.models.values():
        times = [point.time for point in track.points]
        assert times == sorted(set(times))
        assert all(
            time % POINT_INTERVAL_S == 0 and time > NOW + max(offsets) - RETENTION_S - POINT_INTERVAL_S
            for time in times
        )
        assert len(times) <= MAX_POINTS


def test_memory_is_bounded_over_time_and_models():
    history = SwarmHistory()
    for number in range(MAX_POINTS + 50):
        history.record(poll(NOW + number * POINT_INTERVAL_S))
    assert len(points(history)) <= MAX_POINTS
    late = NOW + (MAX_POINTS + 50) * POINT_INTERVAL_S
    for number in range(MAX_MODELS + 10):
        history.record(poll(late + number * POINT_INTERVAL_S, name=f"org/model{number}"))
    assert len(history.models) == MAX_MODELS
    assert f"org/model{MAX_MODELS + 9}" in history.models
    history.record(poll(late + 2 * RETENTION_S, name="org/new"))
    assert set(history.models) == {"org/new"}
