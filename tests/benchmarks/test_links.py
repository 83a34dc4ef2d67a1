"""Simulated links: what they do to what is sent over them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.wide_area
from benchmarks.common.links import MIN_TIMEOUT_S, Link, LinkShape, Profile

PROFILES = sorted((Path(benchmarks.wide_area.__path__[0]) / "profiles").glob("*.json"))


def arrivals(shape: LinkShape, *sent: tuple[float, int], seed: int = 0) -> list[float]:
    link = Link(shape, seed)
    return [link.due(now, size) for now, size in sent]


def test_a_link_delays_and_is_as_fast_as_its_rate():
    assert arrivals(LinkShape(0.05), (1, 10), (1, 10**9), (2, 0)) == pytest.approx([1.05, 1.05, 2.05])
    assert arrivals(LinkShape(0.05, rate=1000), (1, 500), (1, 1000), (9, 100)) == pytest.approx([1.55, 2.55, 9.15])


def test_what_is_lost_comes_later_and_holds_up_what_is_behind():
    assert arrivals(LinkShape(0.01, loss=1.0), (0, 10)) == pytest.approx([0.01 + MIN_TIMEOUT_S])
    times = arrivals(LinkShape(0.01, loss=0.05), *((number / 1000, 100) for number in range(2000)))
    late = [one - number / 1000 - 0.01 for number, one in enumerate(times)]
    assert max(late) == pytest.approx(MIN_TIMEOUT_S)
    assert 0 < sum(one == pytest.approx(MIN_TIMEOUT_S) for one in late) < 200
    one_packet, many = (
        sum(arrivals(LinkShape(0.0, loss=0.01), (0, size), seed=seed)[0] > 0 for seed in range(500))
        for size in (1000, 20 * 1400)
    )
    assert 0 < one_packet < 25
    assert many > 50


def test_nothing_passes_a_link_that_stalls():
    times = arrivals(LinkShape(0.0, stall_every_s=30, stall_s=2), *((number / 10, 1) for number in range(6000)))
    late = [one - number / 10 for number, one in enumerate(times)]
    assert max(late) == pytest.approx(2, abs=0.11)
    assert 0.02 < sum(one > 0 for one in late) / len(late) < 0.13


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1, 1e6),
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**5)), max_size=20),
    st.integers(0, 99),
)
def test_everything_arrives_in_order_and_not_before_its_time(delay, jitter, rate, loss, gaps, seed):
    now, sent = 0.0, []
    for gap, size in gaps:
        now += gap
        sent.append((now, size))
    times = arrivals(LinkShape(delay, jitter, rate, loss, stall_every_s=5, stall_s=1), *sent, seed=seed)
    assert times == sorted(times)
    assert all(math.isfinite(one) for one in times)
    earliest = [start + size / rate + delay * (1 - jitter) for start, size in sent]
    assert all(one >= bound - 1e-9 for one, bound in zip(times, earliest, strict=True))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_are_complete(path):
    profile = Profile.read(path)
    assert len(profile.machines) == len(profile.shapes) == 5
    assert all(0 < shape.delay_s < 0.3 for row in profile.shapes for shape in row)
    assert all(profile.shapes[a][b] == profile.shapes[b][a] for a in range(5) for b in range(5))


def test_a_delay_is_half_the_round_trip_and_two_access_networks():
    delays = {path.stem: Profile.read(path).shapes[0][2].delay_s for path in PROFILES}
    assert delays["city"] == pytest.approx(0.009)
    assert delays["world"] == pytest.approx(0.198 / 2 + 0.008)
