"""Groups for tests, and the reference that tries everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.planning.device_group import DeviceGroup, ModelSize, PipelinePlan, PipelineStage, PlannedDevice, PlannedDrive

# Fractions of two are added without rounding, so what should be equal is, and ties are frequent.
SPEEDS = st.sampled_from([0.5, 1.0, 2.0, 4.0])
TIMES = st.sampled_from([0.0, 0.25, 0.5, 2.0])


def group_of(
    speeds: list[float],
    blocks: int,
    *,
    memory: list[int] | None = None,
    send: float = 0.0,
    latency: float = 0.0,
    fixed_order: bool = False,
) -> DeviceGroup:
    """Devices a, b, c, ... with equal links; a block takes one byte, and all blocks fit anywhere unless told."""
    room = memory or [100 * blocks] * len(speeds)
    devices = tuple(PlannedDevice(chr(ord("a") + n), room[n], speed) for n, speed in enumerate(speeds))
    ends = len(speeds) + 1
    sends, latencies = (
        tuple(tuple(0.0 if a == b else value for b in range(ends)) for a in range(ends)) for value in (send, latency)
    )
    return DeviceGroup(devices, ModelSize("model", (1,) * blocks, 0, 1), 1, sends, latencies, fixed_order)


@st.composite
def groups(
    draw: st.DrawFn, speeds: st.SearchStrategy[float] = SPEEDS, times: st.SearchStrategy[float] = TIMES
) -> DeviceGroup:
    """Up to 4 unequal devices with unequal links, for a model of up to 5 unequal blocks."""
    count, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    weights = tuple(draw(st.lists(st.integers(1, 3), min_size=blocks, max_size=blocks)))
    drives = st.none() | st.builds(PlannedDrive, st.integers(0, 100), SPEEDS)
    # In tenths, because a device is filled to nine of them.
    devices = tuple(
        PlannedDevice(f"d{n}", draw(st.integers(0, 12)) * 10, draw(speeds), draw(drives)) for n in range(count)
    )
    model = ModelSize("model", tuple(9 * weight for weight in weights), draw(st.integers(0, 2)), 1)
    table = st.lists(st.tuples(*[times] * (count + 1)), min_size=count + 1, max_size=count + 1).map(tuple)
    links, share = (draw(table), draw(table)), draw(st.sampled_from([0.25, 1.0]))
    return DeviceGroup(devices, model, draw(st.integers(1, 3)), *links, draw(st.booleans()), share)


def all_plans(group: DeviceGroup, use_all_devices: bool = False) -> Iterator[PipelinePlan]:
    """Every plan that fits, by trying every order of every part of the group with every cut of the model."""
    ids = range(len(group.devices))
    for count in range(len(ids) if use_all_devices else 1, len(ids) + 1):
        for ring in itertools.combinations(ids, count) if group.fixed_order else itertools.permutations(ids, count):
            for cuts in itertools.combinations(range(1, group.model.blocks), count - 1):
                spans = itertools.pairwise((0, *cuts, group.model.blocks))
                plan = _plan(group, ring, [Span(*span) for span in spans])
                if plan is not None:
                    yield plan


def _plan(group: DeviceGroup, ring: tuple[int, ...], spans: list[Span]) -> PipelinePlan | None:
    client = len(group.devices)
    stages = [_stage(group, *step) for step in zip(ring, (*ring[1:], client), spans, strict=True)]
    if None in stages:
        return None
    fitting = tuple(stage for stage in stages if stage is not None)
    return PipelinePlan(fitting, group.send[client][ring[0]], group.latency[client][ring[0]])


def _stage(group: DeviceGroup, one: int, to: int, span: Span) -> PipelineStage | None:
    device, weights = group.devices[one], group.model.weights[span.start : span.end]
    cache = span.length * group.cache_tokens * group.model.cache_per_token
    seconds, memory, on_drive = span.length / device.speed, sum(weights) + cache, 0
    if memory > device.usable_memory:
        if device.drive is None or device.drive.space < sum(weights):
            return None
        if cache + min(2 * max(weights), sum(weights)) > device.usable_memory:
            return None
        memory, on_drive = device.usable_memory, memory - device.usable_memory
        seconds += on_drive * group.read_share / device.drive.speed
    send, latency = group.send[one][to], group.latency[one][to]
    return PipelineStage(device, span, seconds, send, latency, memory, on_drive)


def merit(plan: PipelinePlan) -> tuple[float, int, float]:
    """What is minimised."""
    return plan.bottleneck_seconds, len(plan.stages), plan.token_seconds
