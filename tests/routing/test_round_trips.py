from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.round_trips import RoundTrips


def test_a_new_round_trip_moves_the_average():
    trips = RoundTrips(weight=0.25)
    assert trips.get("a", 0.0) is None
    trips.record("a", 0.1, 0.0)
    assert trips.get("a", 1.0) == 0.1
    trips.record("a", 0.5, 2.0)
    assert trips.get("a", 3.0) == pytest.approx(0.2)
    trips.forget("a")
    trips.forget("a")
    assert trips.get("a", 3.0) is None


def test_a_stale_round_trip_counts_no_more():
    trips = RoundTrips(lifetime=10.0)
    trips.record("a", 0.1, 0.0)
    assert trips.get("a", 10.0) == 0.1
    assert trips.get("a", 10.1) is None
    trips.record("a", 0.5, 11.0)
    assert trips.get("a", 11.0) == 0.5  # it begins anew
    trips.record("b", 0.5, 100.0)
    assert len(trips) == 1


def test_the_one_measured_longest_ago_makes_room():
    trips = RoundTrips(max_peers=2)
    for when, name in enumerate(["a", "b", "a", "c"]):
        trips.record(name, 0.1, when)
    assert [trips.get(name, 4) for name in "abc"] == [0.1, None, 0.1]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 100), st.floats(0, 30)), max_size=30),
    st.integers(1, 5),
    st.floats(0.01, 1),
)
def test_averages_stay_within_what_was_measured_and_within_bounds(measured, limit, weight):
    trips = RoundTrips(weight, lifetime=20.0, max_peers=limit)
    now, seen = 0.0, {}
    for peer, seconds, later in measured:
        now += later
        trips.record(peer, seconds, now)
        seen.setdefault(peer, []).append(seconds)
        assert len(trips) <= limit
        average = trips.get(peer, now)
        assert average is not None
        assert min(seen[peer]) * 0.999 <= average <= max(seen[peer]) * 1.001


def test_recent_round_trips_are_a_copy():
    trips = RoundTrips(lifetime=10.0, fresh=5.0)
    trips.record("a", 0.1, 0.0)
    trips.record("b", 0.2, 8.0)
    handed_out = trips.recent(9.0)
    assert handed_out == {"a": 0.1, "b": 0.2}
    assert trips.recent(11.0) == {"b": 0.2}
    trips.record("b", 0.9, 11.0)
    assert handed_out["b"] == 0.2
    assert trips.is_fresh("b", 15.0)
    assert not trips.is_fresh("b", 16.0)
    assert not trips.is_fresh("nobody", 0.0)
