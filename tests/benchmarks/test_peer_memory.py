"""How the soak tells a peer's growth from its warm-up."""

from __future__ import annotations

import os

import pytest

from benchmarks.common.peer_memory import WARM_UP_S, WINDOW_S, PeerMemory, growth

HOUR_S = 3600.0
MB = 2.0**20


def test_the_warm_up_is_no_growth():
    samples = [(when, MB * min(50.0, when)) for when in map(float, range(0, 3600, 10))]
    assert growth(samples).bytes == 0


def test_steady_growth_is_measured_between_the_middles_of_both_windows():
    found = growth([(when, MB * when / 60) for when in map(float, range(0, 3601, 10))])
    assert found.seconds == HOUR_S - WARM_UP_S - WINDOW_S
    assert found.bytes == pytest.approx(MB * found.seconds / 60)


def test_samples_of_a_process():
    memory = PeerMemory()
    assert memory.life_s == 0
    for _ in range(2):
        memory.take_sample(os.getpid())
    kept = bytearray(os.urandom(1)) * (64 << 20)
    memory.take_sample(os.getpid())
    assert memory.samples[-1].own - memory.samples[0].own > len(kept) // 2
    assert memory.life_s > 0
    memory.take_sample(2**22 + 1)  # there is no such process: beyond the largest id
    assert len(memory.samples) == 3
