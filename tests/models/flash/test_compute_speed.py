"""The speed of products on this machine."""

from __future__ import annotations

import pytest
import torch

from swarm.models.flash import compute_speed
from swarm.models.flash.record_layout import RecordLayout


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(compute_speed, "WEIGHT_BYTES", 1 << 18)


LAYOUTS = {
    "neurons": RecordLayout.of({"up": (256, 64), "down": (64, 256)}, {"up": 0, "down": 1}, torch.float32),
    "gated": RecordLayout.of(
        {"up": (256, 64), "gate": (256, 64), "down": (64, 256)}, {"up": 0, "gate": 0, "down": 1}, torch.bfloat16
    ),
    "experts": RecordLayout.of({"gate_up": (8, 32, 64), "down": (8, 64, 16)}, {"gate_up": 0, "down": 0}, torch.float32),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_measures_records_of_every_kind(name):
    speed = compute_speed.record_speed(LAYOUTS[name])
    counts, seconds = zip(*speed.points, strict=True)
    assert counts == compute_speed.TOKENS[: len(counts)]
    assert all(value > 0 for value in seconds)
    assert list(seconds) == sorted(seconds), "more tokens never take less time"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_resident_weights(dtype):
    assert compute_speed.resident_speed(64, dtype).seconds(1e6) > 0


def test_measures_moves():
    assert compute_speed.move_speed(4096) > 0


def test_a_slow_machine_is_measured_for_fewer_tokens(monkeypatch):
    monkeypatch.setattr(compute_speed, "MAX_S", 0.0)
    assert len(compute_speed.resident_speed(64, torch.float32).points) == 1
