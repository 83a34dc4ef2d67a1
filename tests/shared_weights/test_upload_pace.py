from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.shared_weights.manifest import CHUNK_BYTES
from swarm.shared_weights.upload_pace import BUSY_BYTES_PER_S, UploadPace
from tests import virtual_time

sizes = st.lists(st.integers(0, 4 * CHUNK_BYTES), min_size=1, max_size=20)
rates = st.none() | st.floats(1e3, 1e9)


def seconds(sizes: list[int], bytes_per_s: float | None, is_busy: bool, at_once: bool = False) -> list[float]:
    """When each of these may be sent, one after the other or all asked for at once."""
    ends: list[float] = []

    async def scenario() -> None:
        pace = UploadPace(time.monotonic, bytes_per_s, lambda: is_busy)

        async def send(size: int) -> None:
            await pace.wait(size)
            ends.append(time.monotonic())

        if at_once:
            await asyncio.gather(*map(send, sizes))
        else:
            for size in sizes:
                await send(size)

    virtual_time.run(scenario, limit=1e9)
    return ends


@given(sizes)
def test_without_a_bound_nothing_waits(sizes):
    assert seconds(sizes, None, is_busy=False) == [0.0] * len(sizes)


@given(sizes, rates, st.booleans(), st.booleans())
def test_no_more_is_sent_than_the_bounds_allow_and_no_less(sizes, rate, is_busy, at_once):
    """A chunk is free, and then all together are sent at the rate of whichever bound is lower."""
    bounds = [one for one in (rate, BUSY_BYTES_PER_S if is_busy else None) if one is not None]
    ends = sorted(seconds(sizes, rate, is_busy, at_once))
    if bounds:
        expected = max(0.0, sum(sizes) - CHUNK_BYTES) / min(bounds)
        assert ends[-1] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert ends[-1] == 0.0


def test_clients_that_come_slow_it_down_and_those_that_leave_do_not():
    busy, ends = False, []

    async def scenario() -> None:
        nonlocal busy
        pace = UploadPace(time.monotonic, None, lambda: busy)
        for are_there in (False, True, False):
            busy = are_there
            began = time.monotonic()
            for _ in range(9):
                await pace.wait(CHUNK_BYTES)
            ends.append(time.monotonic() - began)

    virtual_time.run(scenario)
    assert ends == [0.0, pytest.approx(8 * CHUNK_BYTES / BUSY_BYTES_PER_S), 0.0]
