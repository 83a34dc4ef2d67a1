"""What is printed about a plan."""

from __future__ import annotations

import dataclasses
import json
import shlex

from hypothesis import given, settings

from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PlannedDevice, PlannedDrive
from swarm.planning.partition import partition
from swarm.planning.plan_report import (
    StartOptions,
    advise,
    format_commands,
    format_plan,
    plan_to_json,
    server_commands,
)
from tests.planning.groups import all_plans, group_of, groups

ADDRESSES = ("/ip4/1.2.3.4/tcp/1/p2p/Qm", "/ip4/5.6.7.8/tcp/1/p2p/Qn")


def test_the_table() -> None:
    group = group_of([3.0, 1.0, 0.1], 8, memory=[100, 100, 50])
    plan = partition(group)
    lines = format_plan(group, plan, advise(group, plan), "5 ms").splitlines()
    assert lines[0] == "model: 8 blocks take 8 B with an attention cache of 1 tokens"
    assert "Links: 5 ms unless described otherwise" in lines
    table = [" ".join(line.split()) for line in lines]
    assert "a 0:6 6 B of 90 B 2000.00 2000.00 0.00 100%" in table
    assert "b 6:8 2 B of 90 B 2000.00 2000.00 0.00 100%" in table
    assert "c none 0 B of 45 B" in table
    predicted = "0.5 tokens/s with a full pipeline (2 or more concurrent sessions), 0.25 in a single session"
    assert f"Predicted: {predicted}" in lines
    assert "Bottleneck: a, 2000.00 ms per token, 100% of it computing" in lines
    assert any(line.startswith("WARNING: leave out c: 0.1 tokens/s (") for line in lines)


def test_how_the_order_was_found_is_said() -> None:
    for count, fixed, said in (
        (3, False, "in the best order"),
        (3, True, "in the order given;"),
        (20, True, "in the order given (too many to try all orders)"),
    ):
        group = group_of([1.0] * count, 20, fixed_order=fixed)
        assert said in format_plan(group, partition(group), [], "5 ms")


def test_the_bottleneck_is_a_link() -> None:
    group = group_of([1e6, 1e6], 2, memory=[2, 2], send=1.0)
    assert "Bottleneck: a, 1000.00 ms per token, 100% of it sending" in format_plan(group, partition(group), [], "5 ms")
    client_slow = DeviceGroup(group.devices, group.model, 1, ((0, 1, 1), (1, 0, 1), (4, 4, 0)), group.latency)
    said = format_plan(client_slow, partition(client_slow), [], "5 ms")
    assert "Bottleneck: the client, which sends a token to a in 4000.00 ms" in said


def test_what_lies_on_a_drive() -> None:
    group = group_of([1.0], 10, memory=[5])
    device = dataclasses.replace(group.devices[0], drive=PlannedDrive(10, 2.0))
    group = dataclasses.replace(group, devices=(device,))
    plan = partition(group)
    text = format_plan(group, plan, [], "5 ms")
    assert "a 0:10 4 B of 4 B, 6 B on its drive 13000.00" in " ".join(text.split())
    assert "Bottleneck: a, 13000.00 ms per token, 100% of it reading and computing" in text
    assert json.loads(plan_to_json(group, plan, [], StartOptions(None)))["stages"][0]["on_drive"] == 6


def test_commands_of_a_new_swarm() -> None:
    plan = partition(group_of([1.0, 1.0], 4))
    assert server_commands(plan, StartOptions("org/model", ("--cache-tokens", "9"))) == [
        "swarm server org/model --blocks 0:2 --cache-tokens 9 --name a --new-swarm",
        "swarm server org/model --blocks 2:4 --cache-tokens 9 --name b --initial-peers ADDRESS",
    ]
    assert "# b; ADDRESS is what a prints after --initial-peers" in format_commands(plan, StartOptions(None))


def test_commands_that_join() -> None:
    plan = partition(group_of([1.0, 1.0], 4))
    joined = " ".join(ADDRESSES)
    assert server_commands(plan, StartOptions(None, initial_peers=ADDRESSES)) == [
        f"swarm server --blocks 0:2 --name a --initial-peers {joined}",
        f"swarm server --blocks 2:4 --name b --initial-peers {joined}",
    ]
    assert "ADDRESS is" not in format_commands(plan, StartOptions(None, initial_peers=ADDRESSES))


def test_names_cannot_run_commands() -> None:
    group = group_of([1.0], 2)
    evil = DeviceGroup((PlannedDevice("x; rm -rf $HOME `id`'", 1000, 1.0),), group.model, 1, group.send, group.latency)
    (command,) = server_commands(partition(evil), StartOptions("a folder/it's"))
    words = shlex.split(command)
    assert words[words.index("--name") + 1] == "x; rm -rf $HOME `id`'"
    assert words[2] == "a folder/it's"


def test_json() -> None:
    group = group_of([3.0, 1.0, 0.1], 8)
    plan = partition(group)
    content = json.loads(plan_to_json(group, plan, advise(group, plan), StartOptions(None)))
    assert [(stage["device"], stage["start"], stage["end"]) for stage in content["stages"]] == [
        ("a", 0, 6),
        ("b", 6, 8),
    ]
    assert content["tokens_per_second"] == {"pipeline": 0.5, "session": 0.25}
    assert content["unused"] == ["c"]
    assert content["bottleneck"] == "a"
    assert content["leave_out"][0]["devices"] == ["c"]
    assert content["leave_out"][0]["with"]["pipeline"] == 0.1
    assert content["leave_out"][0]["without"]["pipeline"] == 0.5


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
