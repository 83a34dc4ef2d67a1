from __future__ import annotations

import asyncio
import multiprocessing
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.compute import cpu_contention
from swarm.server.compute.cpu_contention import (
    CONTENTION_FULL,
    CONTENTION_START,
    SAMPLE_PERIOD_S,
    CpuContentionMeter,
)
from tests import virtual_time
from tests.waiting import wait_until

shares = st.floats(0, 1)


@given(shares, shares)
def test_a_share(used, mine):
    assert 0 <= cpu_contention.cpu_contention(used, mine) <= 1


@given(shares)
def test_a_machine_that_is_busy_with_this_process_alone_is_not_crowded(used):
    assert cpu_contention.cpu_contention(used, 0.9 * used) == 0 or used == 0


@pytest.mark.parametrize(
    ("used", "expected"),
    [(0.0, 0), (CONTENTION_START, 0), ((CONTENTION_START + CONTENTION_FULL) / 2, 0.5), (CONTENTION_FULL, 1), (1.0, 1)],
)
def test_others_crowd_it_by_what_they_use(used, expected):
    assert cpu_contention.cpu_contention(used, used / 3) == pytest.approx(expected)


def burn(go_on) -> None:
    while go_on.is_set():
        pass


def test_other_processes_are_seen(monkeypatch):
    """The limits are set so that one busy processor of those that are here is a crowd."""
    monkeypatch.setattr(cpu_contention, "SAMPLE_PERIOD_S", 0.1)
    monkeypatch.setattr(cpu_contention, "CONTENTION_START", 0.0)
    monkeypatch.setattr(cpu_contention, "CONTENTION_FULL", 0.1 / multiprocessing.cpu_count())
    context = multiprocessing.get_context("spawn")
    go_on, meter = context.Event(), CpuContentionMeter()
    go_on.set()
    other = context.Process(target=burn, args=(go_on,), daemon=True)
    other.start()
    try:
        wait_until(lambda: meter.level() == 1)
    finally:
        go_on.clear()
        other.join()


def test_other_processes_are_gone_again_when_it_measures_next(monkeypatch):
    """The machine is played: others may keep a real one busy for as long as they like."""
    used = 90.0
    monkeypatch.setattr(cpu_contention.psutil, "cpu_percent", lambda: used)

    async def scenario():
        nonlocal used
        meter = CpuContentionMeter()
        meter._process = SimpleNamespace(cpu_percent=lambda: 0.0)
        assert meter.level() == 1
        used = 10.0
        await asyncio.sleep(0.9 * SAMPLE_PERIOD_S)
        assert meter.level() == 1
        await asyncio.sleep(0.2 * SAMPLE_PERIOD_S)
        assert meter.level() == 0

    virtual_time.run(scenario)
