"""Finds devices that make a group slower. Pure.

A device can cost more than it gains: its link may be slow, or it may compute so slowly that even a single block on it
is the slowest stage. And every additional device adds travel time to each token, even if the pipeline gets faster.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PipelinePlan
from swarm.planning.partition import partition

MIN_SPEEDUP = 1.001
"""A device is reported only if the group is faster without it by more than this factor."""


@dataclass(frozen=True)
class LeaveOutAdvice:
    """The advice to leave some devices out.

    Attributes:
        names: names of the devices.
        plan_with: the best plan that uses them.
        plan_without: the best plan without them.
    """

    names: tuple[str, ...]
    plan_with: PipelinePlan
    plan_without: PipelinePlan

    def __str__(self) -> str:
        names, it = " and ".join(self.names), "it" if len(self.names) == 1 else "them"
        rates = f"{_format_rates(self.plan_with)} with {it}, {_format_rates(self.plan_without)} without"
        if self.plan_without.pipeline_rate < self.plan_with.pipeline_rate:
            return f"leave out {names} if one session at a time matters most: {rates}"
        return f"leave out {names}: {rates}"


def _format_rates(plan: PipelinePlan) -> str:
    return f"{plan.pipeline_rate:.3g} tokens/s ({plan.session_rate:.3g} in a single session)"


def advise(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """Find devices without which the group is faster, in total or for a single session.

    Args:
        best: the group's best plan.
    """
    advice = [] if len(best.stages) == len(group.devices) else _advise_on_idle_devices(group, best)
    return advice + _advise_for_single_session(group, best)


def _advise_on_idle_devices(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """Compare the best plan with one that also uses the devices without blocks."""
    names = _device_names(best)
    idle = tuple(device.name for device in group.devices if device.name not in names)
    with suppress(NotEnoughMemory):  # some of them cannot hold even one block
        plan_with = partition(group, use_all_devices=True)
        if max(best.pipeline_rate / plan_with.pipeline_rate, best.session_rate / plan_with.session_rate) > MIN_SPEEDUP:
            return [LeaveOutAdvice(idle, plan_with, best)]
    return []


def _advise_for_single_session(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """Find the device without which a single session is fastest, if that is faster than the best plan."""
    found: list[LeaveOutAdvice] = []
    for index, device in enumerate(group.devices):
        if device.name not in _device_names(best):
            continue
        with suppress(NotEnoughMemory):
            without = partition(group.without(index))
            if without.session_rate > best.session_rate * MIN_SPEEDUP:
                names = tuple(name for name in _device_names(best) if name not in _device_names(without))
                found.append(LeaveOutAdvice(names, best, without))
    return [max(found, key=lambda advice: advice.plan_without.session_rate)] if found else []


def _device_names(plan: PipelinePlan) -> tuple[str, ...]:
    return tuple(stage.device.name for stage in plan.stages)
