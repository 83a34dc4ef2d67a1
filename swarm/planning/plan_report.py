"""Reports a plan: as text with commands to copy, as JSON, and as a chart; and names devices that make a group slower.

A device can cost more than it gains: its link may be slow, or it may compute so slowly that even a single block on it
is the slowest stage. And every additional device adds travel time to each token, even if the pipeline gets faster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from swarm.common.units import format_bytes
from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PipelinePlan, PipelineStage
from swarm.planning.partition import can_try_all_orders, partition
from swarm.server.limits import MAX_MEMORY_SHARE

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


@dataclass(frozen=True)
class StartOptions:
    """What the server commands need in addition to the plan.

    Attributes:
        model: the model argument of `swarm server`; None for the demo model.
        options: options of every server.
        initial_peers: addresses of an existing swarm; empty if the first device starts it.
    """

    model: str | None
    options: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()


def format_plan(group: DeviceGroup, plan: PipelinePlan, advice: Iterable[LeaveOutAdvice], link: str) -> str:
    """Format everything except the commands. `link` describes the link between devices without one of their own."""
    parts = [
        _format_heading(group, link),
        _format_table(group, plan),
        _format_predictions(plan),
        *(f"WARNING: {one}" for one in advice),
    ]
    return "\n".join(parts)


def _format_heading(group: DeviceGroup, link: str) -> str:
    model = group.model
    order = _format_order(group)
    memory = format_bytes(model.memory(0, model.blocks, group.cache_tokens))
    return (
        f"{model.name}: {model.blocks} blocks take {memory} with an attention cache of {group.cache_tokens} tokens\n"
        f"The ring visits the devices {order}; {MAX_MEMORY_SHARE:.0%} of a device's memory may be filled\n"
        f"Links: {link} unless described otherwise\n"
    )


def _format_order(group: DeviceGroup) -> str:
    if not group.fixed_order:
        return "in the best order"
    few = can_try_all_orders(len(group.devices), group.model.blocks)
    return "in the order given" if few else "in the order given (too many to try all orders)"


def _format_table(group: DeviceGroup, plan: PipelinePlan) -> str:
    rows: list[tuple[str, ...]] = [("device", "blocks", "memory", "ms/token", "computing", "sending", "busy")]
    for stage in plan.stages:
        rows.append(
            (
                stage.device.name,
                str(stage.span),
                _format_memory(stage),
                *(f"{seconds * 1000:.2f}" for seconds in (stage.seconds, stage.compute, stage.send)),
                f"{stage.seconds / plan.bottleneck_seconds:.0%}",
            )
        )
    used = {stage.device.name for stage in plan.stages}
    for device in group.devices:
        if device.name not in used:
            rows.append((device.name, "none", f"0 B of {format_bytes(device.usable_memory)}", "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_format_row(row, widths) for row in rows) + "\n"


def _format_memory(stage: PipelineStage) -> str:
    said = f"{format_bytes(stage.memory)} of {format_bytes(stage.device.usable_memory)}"
    return f"{said}, {format_bytes(stage.on_drive)} on its drive" if stage.on_drive else said


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    words = [cell.ljust(w) if n < 3 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(words).rstrip()


def _format_predictions(plan: PipelinePlan) -> str:
    full = f"with a full pipeline ({plan.sessions} or more concurrent sessions)"
    return (
        f"Predicted: {plan.pipeline_rate:.3g} tokens/s {full}, {plan.session_rate:.3g} in a single session\n"
        f"Bottleneck: {_format_bottleneck(plan)}"
    )


def _format_bottleneck(plan: PipelinePlan) -> str:
    stage = plan.bottleneck
    if stage is None:
        return f"the client, which sends a token to {plan.stages[0].device.name} in {plan.client_send * 1000:.2f} ms"
    working = "reading and computing" if stage.on_drive else "computing"
    doing = working if stage.compute >= stage.send else "sending"
    share = max(stage.compute, stage.send) / stage.seconds
    return f"{stage.device.name}, {stage.seconds * 1000:.2f} ms per token, {share:.0%} of it {doing}"


def server_commands(plan: PipelinePlan, startup: StartOptions) -> list[str]:
    """One shell command per stage, in the order in which to start the servers."""
    first = plan.stages[0].device.name
    return [_command(stage, startup, stage.device.name == first) for stage in plan.stages]


def _command(stage: PipelineStage, startup: StartOptions, first: bool) -> str:
    model = [startup.model] if startup.model is not None else []
    swarm = ["--initial-peers", *startup.initial_peers] if startup.initial_peers else ["--initial-peers", "ADDRESS"]
    if first and not startup.initial_peers:
        swarm = ["--new-swarm"]
    words = ["swarm", "server", *model, "--blocks", str(stage.span), *startup.options, "--name", stage.device.name]
    return shlex.join([*words, *swarm])


def format_commands(plan: PipelinePlan, startup: StartOptions) -> str:
    """Format the commands with a comment line each."""
    lines = []
    for number, (stage, command) in enumerate(zip(plan.stages, server_commands(plan, startup), strict=True)):
        where = f"; ADDRESS is what {plan.stages[0].device.name} prints after --initial-peers"
        lines.append(f"# {stage.device.name}{where if number == 1 and not startup.initial_peers else ''}\n{command}")
    return "\n".join(lines)


def plan_to_json(
    group: DeviceGroup, plan: PipelinePlan, advice: Iterable[LeaveOutAdvice], startup: StartOptions
) -> bytes:
    """Encode the plan as JSON, in seconds, bytes and tokens/s."""
    used = {stage.device.name for stage in plan.stages}
    stages = [
        {
            "device": stage.device.name,
            "start": stage.span.start,
            "end": stage.span.end,
            "memory": stage.memory,
            "memory_available": stage.device.usable_memory,
            "on_drive": stage.on_drive,
            "compute_seconds": stage.compute,
            "send_seconds": stage.send,
            "latency_seconds": stage.latency,
            "busy": stage.seconds / plan.bottleneck_seconds,
            "command": command,
        }
        for stage, command in zip(plan.stages, server_commands(plan, startup), strict=True)
    ]
    bottleneck = plan.bottleneck
    content = {
        "model": group.model.name,
        "blocks": group.model.blocks,
        "cache_tokens": group.cache_tokens,
        "best_order": not group.fixed_order,
        "stages": stages,
        "unused": [device.name for device in group.devices if device.name not in used],
        "tokens_per_second": _both_rates(plan),
        "sessions": plan.sessions,
        "bottleneck": bottleneck.device.name if bottleneck is not None else "client",
        "leave_out": [
            {"devices": one.names, "with": _both_rates(one.plan_with), "without": _both_rates(one.plan_without)}
            for one in advice
        ],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _both_rates(plan: PipelinePlan) -> dict[str, float]:
    return {"pipeline": plan.pipeline_rate, "session": plan.session_rate}
