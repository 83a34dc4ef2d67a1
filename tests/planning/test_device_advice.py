from __future__ import annotations

from hypothesis import given, settings

from swarm.errors import NotEnoughMemory
from swarm.planning.device_advice import advise
from swarm.planning.device_group import DeviceGroup
from swarm.planning.partition import partition
from tests.planning.groups import all_plans, group_of, groups


def test_equal_devices_near_each_other_are_all_welcome() -> None:
    group = group_of([1.0, 1.0], 8)
    assert advise(group, partition(group)) == []


def test_a_device_that_slows_the_pipeline_down() -> None:
    group = group_of([10.0, 10.0, 0.1], 10)
    (advice,) = advise(group, partition(group))
    assert advice.names == ("c",)
    assert str(advice) == (
        "leave out c: 0.1 tokens/s (0.0917 in a single session) with it, 2 tokens/s (1 in a single session) without"
    )


def test_a_device_that_only_slows_a_single_session_down() -> None:
    group = group_of([4.0, 2.0], 6, latency=1.0)
    best = partition(group)
    assert len(best.stages) == 2
    (advice,) = advise(group, best)
    assert advice.names == ("b",)
    assert advice.plan_without.session_rate > best.session_rate
    assert advice.plan_without.pipeline_rate < best.pipeline_rate
    assert str(advice).startswith("leave out b if one session at a time matters most: ")


def test_a_device_that_is_needed_for_its_memory_stays() -> None:
    group = group_of([10.0, 0.1], 10, memory=[10, 10])
    assert advise(group, partition(group)) == []


def test_a_device_that_can_hold_nothing_needs_no_warning() -> None:
    group = group_of([1.0, 1.0], 4, memory=[100, 0])
    assert advise(group, partition(group)) == []


@given(groups())
@settings(deadline=None, max_examples=100)
def test_following_the_advice_helps(group: DeviceGroup) -> None:
    try:
        best = partition(group)
    except NotEnoughMemory:
        return
    for advice in advise(group, best):
        assert not {stage.device.name for stage in advice.plan_without.stages} & set(advice.names)
        assert {stage.device.name for stage in advice.plan_with.stages} >= set(advice.names)
        assert (
            advice.plan_without.pipeline_rate > advice.plan_with.pipeline_rate
            or advice.plan_without.session_rate > advice.plan_with.session_rate
        )
        assert advice.plan_without in all_plans(group)
        assert advice.plan_with in all_plans(group)


@given(groups())
@settings(deadline=None, max_examples=100)
def test_devices_that_would_slow_the_group_down_are_named(group: DeviceGroup) -> None:
    forced = list(all_plans(group, use_all_devices=True))
    if not forced:
        return
    best = partition(group)
    fastest = max(plan.pipeline_rate for plan in forced)
    named = {name for advice in advise(group, best) for name in advice.names}
    if fastest < best.pipeline_rate:
        assert named >= {device.name for device in group.devices} - {stage.device.name for stage in best.stages}
