"""The speed of products on this machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from swarm.models.flash.costs import compute_speed
from swarm.models.flash.costs.cost_model import ComputeSpeed
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.records.record_layout import RecordLayout


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(compute_speed, "WEIGHT_BYTES", 1 << 18)


def neurons(dtype: torch.dtype, *roles: str) -> tuple[BlockPlan, RecordLayout]:
    axes = {f"{role}.weight": int(role == "down") for role in roles}
    shapes = {f"{role}.weight": (64, 256) if role == "down" else (256, 64) for role in roles}
    plan = BlockPlan(RecordKind.NEURONS, {role: role for role in (*roles, "activation")}, axes)
    return plan, plan.layout(shapes, dtype)


def check(speed: ComputeSpeed) -> None:
    counts, seconds = zip(*speed.points, strict=True)
    assert counts == compute_speed.TOKENS[: len(counts)]
    assert all(value > 0 for value in seconds)
    assert list(seconds) == sorted(seconds), "more tokens never take less time"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("roles", [("up", "down"), ("up", "gate", "down")])
def test_measures_neurons_with_and_without_a_gate(dtype, roles):
    plan, layout = neurons(dtype, *roles)
    check(compute_speed.neuron_speed(plan, layout, nn.ReLU()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_resident_weights(dtype):
    check(compute_speed.resident_speed(64, dtype))
    check(compute_speed.plain_speed(64, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_experts(dtype):
    plan = BlockPlan(RecordKind.EXPERTS, {"experts": "experts"}, {"experts.up": 0, "experts.down": 0})
    shapes = {"experts.up": (8, 128, 64), "experts.down": (8, 64, 128)}
    check(compute_speed.expert_speed(plan.layout(shapes, dtype)))


def test_measures_moves():
    _, layout = neurons(torch.float32, "up", "down")
    assert compute_speed.move_speed(layout) > 0


def test_a_slow_machine_is_measured_for_fewer_tokens(monkeypatch):
    monkeypatch.setattr(compute_speed, "MAX_S", 0.0)
    assert len(compute_speed.resident_speed(64, torch.float32).points) == 1


@pytest.mark.parametrize("kind", [RecordKind.NEURONS, RecordKind.EXPERTS])
def test_measures_a_machine_for_blocks_of_one_kind(kind):
    plan, layout = neurons(torch.float32, "up", "down")
    plan = dataclasses.replace(plan, kind=kind)
    drive = DriveSpeed("direct", (1,), (4096,), ((1e-4,),))
    machine = compute_speed.machine_speed(drive, plan, layout, 64, nn.ReLU())
    check(machine.resident)
    check(machine.records)
    assert machine.drive is drive
    assert (machine.move_s_per_byte > 0) is (kind is RecordKind.NEURONS)
