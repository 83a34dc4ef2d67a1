"""Devices that make a group slower. Pure.

A device can cost more than it brings: its link is slow, or it computes so slowly that even one block of it is the
slowest stage. And every further device makes one token's way longer, whatever the pipeline gains by it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PipelinePlan
from swarm.planning.partition import partition

NOTICEABLE = 1.001
"""By how much the group must be faster without a device before it is worth a word."""


@dataclass(frozen=True)
class LeaveOutAdvice:
    """Leave some devices out.

    Attributes:
        names: the devices.
        having: the best plan in which they take part.
        without: the best plan without them.
    """

    names: tuple[str, ...]
    having: PipelinePlan
    without: PipelinePlan

    def __str__(self) -> str:
        names, it = " and ".join(self.names), "it" if len(self.names) == 1 else "them"
        rates = f"{_rates(self.having)} with {it}, {_rates(self.without)} without"
        if self.without.pipeline_rate < self.having.pipeline_rate:
            return f"leave out {names} if one session at a time matters most: {rates}"
        return f"leave out {names}: {rates}"


def _rates(plan: PipelinePlan) -> str:
    return f"{plan.pipeline_rate:.3g} tokens/s ({plan.session_rate:.3g} in a single session)"


def advise(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """Devices without which the group is faster, in all or for a single session.

    Args:
        best: the group's best plan.
    """
    advice = [] if len(best.stages) == len(group.devices) else _idle(group, best)
    return advice + _slow_for_one(group, best)


def _idle(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """What it would cost if the devices that got no blocks held some."""
    names = _names(best)
    idle = tuple(device.name for device in group.devices if device.name not in names)
    with suppress(NotEnoughMemory):  # some of them cannot hold even one
        having = partition(group, everyone=True)
        if max(best.pipeline_rate / having.pipeline_rate, best.session_rate / having.session_rate) > NOTICEABLE:
            return [LeaveOutAdvice(idle, having, best)]
    return []


def _slow_for_one(group: DeviceGroup, best: PipelinePlan) -> list[LeaveOutAdvice]:
    """The device without which a single session is fastest, if it is faster than in the best plan."""
    found: list[LeaveOutAdvice] = []
    for index, device in enumerate(group.devices):
        if device.name not in _names(best):
            continue
        with suppress(NotEnoughMemory):
            without = partition(group.without(index))
            if without.session_rate > best.session_rate * NOTICEABLE:
                names = tuple(name for name in _names(best) if name not in _names(without))
                found.append(LeaveOutAdvice(names, best, without))
    return [max(found, key=lambda advice: advice.without.session_rate)] if found else []


def _names(plan: PipelinePlan) -> tuple[str, ...]:
    return tuple(stage.device.name for stage in plan.stages)
