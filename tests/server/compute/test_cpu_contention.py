from __future__ import annotations

import multiprocessing
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.compute import cpu_contention as crowding
from swarm.server.compute.cpu_contention import FREE, FULL, Machine

shares = st.floats(0, 1)


@given(shares, shares)
def test_a_share(used, mine):
    assert 0 <= crowding.crowding(used, mine) <= 1


@given(shares)
def test_a_machine_that_is_busy_with_this_process_alone_is_not_crowded(used):
    assert crowding.crowding(used, 0.9 * used) == 0 or used == 0


@pytest.mark.parametrize(("used", "expected"), [(0.0, 0), (FREE, 0), ((FREE + FULL) / 2, 0.5), (FULL, 1), (1.0, 1)])
def test_others_crowd_it_by_what_they_use(used, expected):
    assert crowding.crowding(used, used / 3) == pytest.approx(expected)


def burn(go_on) -> None:
    while go_on.is_set():
        pass


def test_other_processes_are_seen_and_gone_again(monkeypatch):
    """The limits are set so that one busy processor of those that are here is a crowd."""
    monkeypatch.setattr(crowding, "PERIOD", 0.1)
    monkeypatch.setattr(crowding, "FREE", 0.0)
    monkeypatch.setattr(crowding, "FULL", 0.1 / multiprocessing.cpu_count())
    context = multiprocessing.get_context("spawn")
    go_on, machine = context.Event(), Machine()
    go_on.set()
    other = context.Process(target=burn, args=(go_on,), daemon=True)
    other.start()
    try:
        deadline = time.monotonic() + 20
        while machine.crowding() < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        go_on.clear()
        other.join()
