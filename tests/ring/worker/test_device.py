"""What a device is, and its speed, which is measured once."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from swarm.ring.worker import device as devices
from swarm.ring.worker.device import (
    SPEED_FILE,
    Device,
    DeviceSpeed,
    describe,
    find_speed,
    keep_speed,
    measurement_conditions,
)

SPEED = DeviceSpeed("cpu", "cpu, 2 threads", {"float32": 1e9, "bfloat16": 2e9, "float16": 1e9}, 1e-4)


@pytest.mark.slow
def test_a_speed_is_measured_once(tmp_path, monkeypatch):
    found = asyncio.run(find_speed(tmp_path, "cpu", 1))
    assert set(found.read_rates) == {"float32", "bfloat16", "float16"}
    assert min(found.read_rates.values()) > 1e6
    assert 0 < found.block_seconds < 1
    monkeypatch.setattr(devices, "_measure", None)  # it is not measured again
    assert asyncio.run(find_speed(tmp_path, "cpu", 1)) == found


@pytest.mark.parametrize("data", [None, b"", b"nonsense", b'{"conditions": "others"}'])
def test_what_was_kept_counts_under_the_same_conditions_only(tmp_path, monkeypatch, data):
    async def measure(device, threads):
        return SPEED

    monkeypatch.setattr(devices, "_measure", measure)
    if data is not None:
        (tmp_path / SPEED_FILE).write_bytes(data)
    keep_speed(tmp_path / "none", "x", SPEED)  # a folder that is not there keeps nothing, and says so
    assert asyncio.run(find_speed(tmp_path, "cpu", 1)) == SPEED
    other = DeviceSpeed("cpu", "other", SPEED.read_rates, 1.0)
    keep_speed(tmp_path, measurement_conditions("cpu", 2), other)
    assert asyncio.run(find_speed(tmp_path, "cpu", 1)) == SPEED
    keep_speed(tmp_path, measurement_conditions("cpu", 1), other)
    assert asyncio.run(find_speed(tmp_path, "cpu", 1)) == other


def test_a_report_counts_what_the_own_server_has(tmp_path):
    device = Device("pi", SPEED, tmp_path)
    report = device.report()
    assert report.memory <= psutil.virtual_memory().total
    assert report.disk > 0
    assert device.report(own_process=os.getpid()).memory > report.memory
    assert device.report(own_process=2**22 + 1).memory > 0  # it has ended meanwhile
    assert "2 GB/s of weights in bfloat16" in describe(report)
