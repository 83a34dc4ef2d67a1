"""Groups for tests, and the reference that tries everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.planning.device_group import DeviceGroup, ModelSize, PipelinePlan, PipelineStage, PlannedDevice

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
    # In tenths, because a device is filled to nine of them.
    devices = tuple(PlannedDevice(f"d{n}", draw(st.integers(0, 12)) * 10, draw(speeds)) for n in range(count))
    model = ModelSize("model", tuple(9 * weight for weight in weights), draw(st.integers(0, 2)), 1)
    table = st.lists(st.tuples(*[times] * (count + 1)), min_size=count + 1, max_size=count + 1).map(tuple)
    return DeviceGroup(devices, model, draw(st.integers(1, 3)), draw(table), draw(table), draw(st.booleans()))


def all_plans(group: DeviceGroup, use_all_devices: bool = False) -> Iterator[PipelinePlan]:
    """Every plan that fits, by trying every order of every part of the group with every cut of the model."""
    ids = range(len(group.devices))
    for count in range(len(ids) if use_all_devices else 1, len(ids) + 1):
        for ring in itertools.combinations(ids, count) if group.fixed_order else itertools.permutations(ids, count):
            for cuts in itertools.combinations(range(1, group.model.blocks), count - 1):
                spans = itertools.pairwise((0, *cuts, group.model.blocks))
                plan = _plan(group, ring, [Span(*span) for span in spans])
                if all(stage.memory <= stage.device.usable_memory for stage in plan.stages):
                    yield plan


def _plan(group: DeviceGroup, ring: tuple[int, ...], spans: list[Span]) -> PipelinePlan:
    client = len(group.devices)
    stages = tuple(
        PipelineStage(
            device=group.devices[one],
            span=span,
            compute=span.length / group.devices[one].speed,
            send=group.send[one][to],
            latency=group.latency[one][to],
            memory=sum(group.model.weights[span.start : span.end])
            + span.length * group.cache_tokens * group.model.cache_per_token,
        )
        for one, to, span in zip(ring, (*ring[1:], client), spans, strict=True)
    )
    return PipelinePlan(stages, group.send[client][ring[0]], group.latency[client][ring[0]])


def merit(plan: PipelinePlan) -> tuple[float, int, float]:
    """What is minimised."""
    return plan.bottleneck_seconds, len(plan.stages), plan.token_seconds
