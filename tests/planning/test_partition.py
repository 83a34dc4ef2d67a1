"""The dynamic programme against trying everything, and the cases that one can work out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PipelinePlan, PlannedDrive
from swarm.planning.partition import can_try_all_orders, partition, plan_of
from tests.planning.groups import all_plans, group_of, groups, merit

SLOW = settings(deadline=None, max_examples=300)


def spans(plan: PipelinePlan) -> dict[str, str]:
    return {stage.device.name: str(stage.span) for stage in plan.stages}


@given(groups(), st.booleans())
@SLOW
def test_no_other_plan_is_better(group: DeviceGroup, use_all_devices: bool) -> None:
    plans = list(all_plans(group, use_all_devices))
    if not plans:
        with pytest.raises(NotEnoughMemory):
            partition(group, use_all_devices=use_all_devices)
        return
    plan = partition(group, use_all_devices=use_all_devices)
    assert plan in plans
    assert merit(plan) == min(map(merit, plans))


@given(groups())
@SLOW
def test_all_blocks_are_held_once_and_fit(group: DeviceGroup) -> None:
    try:
        plan = partition(group)
    except NotEnoughMemory:
        return
    ends = [0, *(stage.span.end for stage in plan.stages)]
    assert [(stage.span.start, stage.span.end) for stage in plan.stages] == list(itertools.pairwise(ends))
    assert ends[-1] == group.model.blocks
    assert len({stage.device for stage in plan.stages}) == len(plan.stages)
    assert all(stage.memory <= 0.9 * stage.device.memory for stage in plan.stages)


def _slow_client(group: DeviceGroup, seconds: float) -> DeviceGroup:
    send = (*group.send[:-1], (seconds,) * len(group.send))
    return DeviceGroup(group.devices, group.model, group.cache_tokens, send, group.latency)


def test_the_client_can_be_the_bottleneck() -> None:
    plan = partition(_slow_client(group_of([1.0, 1.0], 2), 8.0))
    assert plan.bottleneck is None
    assert plan.bottleneck_seconds == 8.0


def test_the_order_is_the_best_one_or_the_given_one() -> None:
    base = group_of([1.0, 1.0, 1.0], 3)
    # Only the links client -> a -> c -> b -> client carry a token in no time.
    fast = {(3, 0), (0, 2), (2, 1), (1, 3)}
    send = tuple(tuple(0.0 if (one, to) in fast else 8.0 for to in range(4)) for one in range(4))
    free = partition(DeviceGroup(base.devices, base.model, 1, send, base.latency))
    assert spans(free) == {"a": "0:1", "c": "1:2", "b": "2:3"}
    assert free.bottleneck_seconds == 1.0
    fixed = partition(DeviceGroup(base.devices, base.model, 1, send, base.latency, fixed_order=True))
    assert fixed.bottleneck_seconds == 8.0  # b alone, to which the client sends slowly
    assert spans(fixed) == {"b": "0:3"}


def test_what_is_missing_is_said() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        partition(group_of([1.0, 1.0], 10, memory=[4, 4]))
    message = str(caught.value)
    assert "the 10 blocks take 10 B" in message
    assert "blocks 6:10 (4 B) find no place" in message
    assert "\n" not in message


def test_many_devices_in_a_fixed_order() -> None:
    group = group_of([1.0 + n for n in range(32)], 126, fixed_order=True)
    plan = partition(group)
    assert [stage.device.name for stage in plan.stages] == sorted(stage.device.name for stage in plan.stages)
    # No plan can be faster than blocks without a size: 126 / (1 + 2 + ... + 32) seconds; whole blocks cost some.
    assert 126 / 528 <= plan.bottleneck_seconds <= 0.3


def test_small_groups_try_all_orders() -> None:
    assert can_try_all_orders(10, 80)
    assert can_try_all_orders(8, 126)
    assert not can_try_all_orders(11, 80)


def test_a_drive_holds_what_memory_does_not() -> None:
    without = group_of([1.0], 10, memory=[5])
    with pytest.raises(NotEnoughMemory, match="or give a device a drive"):
        partition(without)
    drive = PlannedDrive(space=10, speed=2.0)
    group = dataclasses.replace(without, devices=(dataclasses.replace(without.devices[0], drive=drive),))
    [stage] = partition(group).stages
    assert (stage.memory, stage.on_drive) == (4, 6)
    assert stage.compute == 10 + 6 / 2.0
    [sparse] = partition(dataclasses.replace(group, read_share=0.1)).stages
    assert sparse.compute == pytest.approx(10 + 0.3)


def test_memory_is_filled_before_a_drive_is_read() -> None:
    group = group_of([1.0, 1.0], 8, memory=[10, 10])
    slow = PlannedDrive(space=100, speed=0.01)
    group = dataclasses.replace(group, devices=tuple(dataclasses.replace(one, drive=slow) for one in group.devices))
    assert [(str(stage.span), stage.on_drive) for stage in partition(group).stages] == [("0:4", 0), ("4:8", 0)]


@pytest.mark.parametrize(("memory", "space"), [(5, 9), (2, 10)], ids=["a small drive", "no memory for two blocks"])
def test_a_drive_does_not_help(memory: int, space: int) -> None:
    group = group_of([1.0], 10, memory=[memory])
    device = dataclasses.replace(group.devices[0], drive=PlannedDrive(space, 1.0))
    with pytest.raises(NotEnoughMemory):
        partition(dataclasses.replace(group, devices=(device,)))


@given(groups())
@SLOW
def test_a_plan_that_is_told_is_the_one_that_was_found(group: DeviceGroup) -> None:
    try:
        plan = partition(group)
    except NotEnoughMemory:
        return
    assert plan_of(group, [(group.devices.index(stage.device), stage.span) for stage in plan.stages]) == plan


def test_a_device_that_cannot_hold_what_it_is_told_is_named() -> None:
    group = group_of([1.0, 1.0], 4, memory=[100, 1])
    with pytest.raises(NotEnoughMemory, match="b cannot hold blocks 1:4: they take 3 B"):
        plan_of(group, [(0, Span(0, 1)), (1, Span(1, 4))])
