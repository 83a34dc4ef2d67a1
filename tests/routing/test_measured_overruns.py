"""What servers take beyond what they announce, as a client has measured it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.peer_health import FORGET_AFTER_S, HALF_LIFE_S, KEPT_STEPS, MAX_OVERRUN_S, MeasuredOverruns

times = st.floats(-100.0, 100.0)


def measured(**peers: float) -> MeasuredOverruns:
    overruns = MeasuredOverruns()
    for peer_id, seconds in peers.items():
        overruns.record(peer_id, seconds, 0.0)
    return overruns


def test_a_server_is_charged_with_what_it_takes_beyond_the_others():
    assert measured(slow=1.0, quick=0.1, middling=0.4).charges(0.0) == pytest.approx(
        {"slow": 0.9, "quick": 0.0, "middling": 0.3}
    )


def test_what_is_alone_is_charged_with_all():
    assert measured(only=1.0).charges(0.0) == {"only": 1.0}


@given(st.floats(0.0, MAX_OVERRUN_S), st.integers(2, 10))
def test_where_all_are_slow_alike_nobody_is_charged(seconds, count):
    assert set(measured(**{f"peer {n}": seconds for n in range(count)}).charges(0.0).values()) == {0.0}


def test_a_server_that_stalls_for_a_moment_is_not_slow():
    overruns = measured(one=0.0, other=0.0)
    overruns.record("one", 0.0, 0.0)
    overruns.record("one", 0.0, 0.0)
    overruns.record("one", 2.0, 0.0)
    assert overruns.charges(0.0)["one"] == 0.0


def test_one_that_was_overtaken_begins_anew_and_is_forgiven_by_and_by():
    overruns = measured(one=0.0, other=0.0)
    overruns.replace("one", 0.5, 0.0)
    assert overruns.charges(0.0)["one"] == 0.5
    assert overruns.charges(HALF_LIFE_S)["one"] == pytest.approx(0.25)
    assert "one" not in overruns.charges(FORGET_AFTER_S + 1)
    for _ in range(KEPT_STEPS):
        overruns.record("one", 0.0, HALF_LIFE_S)
    assert overruns.charges(HALF_LIFE_S)["one"] == 0.0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), times, st.floats(0.0, 1e5)), max_size=60), st.floats(0.0, 1e6))
def test_charges_are_bounded_and_few(records, now):
    overruns = MeasuredOverruns(max_peers=3)
    for peer_id, seconds, when in sorted(records, key=lambda record: record[2]):
        overruns.record(peer_id, seconds, when)
        assert len(overruns) <= 3
    charges = overruns.charges(now)
    assert all(0.0 <= charge <= MAX_OVERRUN_S for charge in charges.values())
    assert len(charges) < 2 or min(charges.values()) == 0.0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_nonsense_is_refused(seconds):
    with pytest.raises(ValueError, match="finite"):
        MeasuredOverruns().record("one", seconds, 0.0)
