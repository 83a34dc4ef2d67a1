from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UsageError
from swarm.monitor.history import (
    FILE_FORMAT,
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


def test_a_file_survives_a_restart(tmp_path):
    path = tmp_path / "history.json"
    history = SwarmHistory()
    for number in range(5):
        history.record(poll(NOW + number * POINT_INTERVAL_S, servers=number + 1))
    history.write(path)
    assert SwarmHistory.read(path, NOW + 4 * POINT_INTERVAL_S).models == history.models
    assert points(SwarmHistory.read(path, NOW + RETENTION_S + 2.5 * POINT_INTERVAL_S)) == points(history)[3:]
    # Points of the future come from another clock.
    assert points(SwarmHistory.read(path, NOW + POINT_INTERVAL_S)) == points(history)[:2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.json"]


def file(**changes: object) -> bytes:
    track = {"blocks": 4, "points": [[NOW, 1, 2.0, 4]]}
    return json.dumps({"format": FILE_FORMAT, "models": {"org/model": track}} | changes).encode()


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path):
    for content in [
        b"",
        b"my thesis",
        b"[" * 100_000,
        file(format="another"),
        file(models={"m": {"blocks": 0, "points": []}}),
        file(models={"m": {"blocks": 4, "points": [[NOW, 1, -2.0, 4]]}}),
        file(models={"m": {"blocks": 4, "points": [["now", 1, 2.0, 4]]}}),
        file(models={"m": {"blocks": 4, "points": [[NOW, 1, 2.0, 4]] * (MAX_POINTS + 1)}}),
        file(models={f"m{n}": {"blocks": 4, "points": []} for n in range(MAX_MODELS + 1)}),
        file().replace(b"2.0", b"NaN"),
    ]:
        path = tmp_path / "history.json"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"not a monitor's history.*another file"):
            SwarmHistory.read(path, NOW)
        assert path.read_bytes() == content
