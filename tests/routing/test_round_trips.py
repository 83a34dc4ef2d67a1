from __future__ import annotations

from swarm.routing.round_trips import STALE, RoundTrips


def test_the_first_measurement_is_taken_as_it_is_and_later_ones_move_it():
    round_trips = RoundTrips()
    round_trips.measured("a", 0.1, 0.0)
    assert round_trips.seconds() == {"a": 0.1}
    round_trips.measured("a", 0.3, 1.0)
    assert 0.1 < round_trips.seconds()["a"] < 0.3
    for now in range(2, 12):
        round_trips.measured("a", 0.3, now)
    assert abs(round_trips.seconds()["a"] - 0.3) < 0.001


def test_measurements_grow_stale():
    round_trips = RoundTrips()
    round_trips.measured("a", 0.1, 10.0)
    assert round_trips.is_fresh("a", 10.0)
    assert not round_trips.is_fresh("a", 10.0 + STALE)
    assert not round_trips.is_fresh("b", 10.0)


def test_memory_is_bounded_and_the_oldest_is_forgotten_first():
    round_trips = RoundTrips(max_peers=2)
    for now, peer in enumerate("abac"):
        round_trips.measured(peer, 0.1, now)
    assert set(round_trips.seconds()) == {"a", "c"}


def test_what_was_handed_out_does_not_change():
    round_trips = RoundTrips()
    round_trips.measured("a", 0.1, 0.0)
    handed_out = round_trips.seconds()
    round_trips.measured("a", 0.9, 1.0)
    assert handed_out == {"a": 0.1}
