"""Which device of a ring holds which blocks: at the start, as told, and after a worker has vanished. Pure.

The starter's blocks are the first ones: it computes them itself (`local_blocks`), and the rest goes to the workers. In
the planner's group the starter is a device, and so is the client behind it, which sends to it for free. No worker sends
to it, so it is the first of the ring or holds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.data_structures import Span
from swarm.errors import NotEnoughMemory, PartitionError
from swarm.planning.device_group import DeviceGroup, ModelSize, PipelinePlan, PlannedDevice, link_tables
from swarm.planning.partition import can_try_all_orders, partition, plan_of
from swarm.protocol.messages import Holding
from swarm.server.limits import MAX_MEMORY_SHARE

MAX_WORKERS = 31
"""A group has at most 32 devices, of which the starter is one."""

STARTER = 0
"""The starter's index in the group."""


@dataclass(frozen=True)
class RingDevice:
    """A device of a ring, as its plan knows it.

    Attributes:
        key: the worker's peer id; "" for the starter.
        name: shown to people.
        memory: bytes that are free for blocks and their attention cache.
        read_rates: for each dtype, bytes/s of weights in a decode step.
        block_seconds: what a block costs for one token beyond its weights.
        latency: one-way seconds between it and the starter.
        bandwidth: bytes/s between it and the starter.
    """

    key: str
    name: str
    memory: int
    read_rates: Mapping[str, float]
    block_seconds: float
    latency: float = 0.0
    bandwidth: float = math.inf

    def speed(self, model: ModelSize, dtype: str) -> float:
        """Blocks of this model that it computes per second for one token."""
        weights = sum(model.weights) / max(model.blocks, 1)
        return 1 / max(weights / self.read_rates[dtype] + self.block_seconds, 1e-9)


@dataclass(frozen=True)
class RingPart:
    """The blocks of one worker."""

    worker: str
    span: Span


@dataclass(frozen=True)
class RingPlan:
    """Who holds what.

    Attributes:
        local_blocks: the starter's first blocks; 0 for none.
        parts: of the workers, in the order of the ring. A worker without blocks has none.
    """

    local_blocks: int
    parts: tuple[RingPart, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.numbers))

    @property
    def numbers(self) -> tuple[int, ...]:
        """As in `--partition`, such as (2, 5, 5)."""
        return (self.local_blocks, *(part.span.length for part in self.parts))

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(part.worker for part in self.parts)


@dataclass(frozen=True)
class RingGroup:
    """The devices of a ring as a group of the planner.

    Attributes:
        group: the starter's index is `STARTER`.
        keys: of the devices, in the same order.
    """

    group: DeviceGroup
    keys: tuple[str, ...]

    def ring_plan(self, plan: PipelinePlan) -> RingPlan:
        """Which peers a plan of the planner is about."""
        keys = dict(zip((device.name for device in self.group.devices), self.keys, strict=True))
        parts = tuple(RingPart(keys[stage.device.name], stage.span) for stage in plan.stages)
        local = parts[0].span.end if parts[0].worker == self.keys[STARTER] else 0
        return RingPlan(local, parts[1:] if local else parts)

    def pipeline_plan(self, plan: RingPlan) -> PipelinePlan:
        """What the planner would say of a plan. Raises `NotEnoughMemory`, which names the device that is too small."""
        placed = [(self.keys.index(part.worker), part.span) for part in plan.parts]
        if plan.local_blocks:
            placed.insert(0, (STARTER, Span(0, plan.local_blocks)))
        return plan_of(self.group, placed)


def make_group(
    starter: RingDevice, workers: Sequence[RingDevice], model: ModelSize, dtype: str, cache_tokens: int
) -> RingGroup:
    """The group of a ring. Two workers are as near to each other as the farther one is to the starter."""
    ring = [starter, *workers]
    ends = [*ring, starter]  # the client runs on the starter's machine

    def link(sender: int, receiver: int) -> tuple[float, float]:
        pair = ends[sender], ends[receiver]
        if pair[0] is pair[1]:
            return 0.0, math.inf
        return max(one.latency for one in pair), min(one.bandwidth for one in pair)

    send, latency = link_tables(len(ends), model.hidden_bytes, link)
    only_client = len(ring)
    send = tuple(
        tuple(math.inf if to == STARTER and one not in (STARTER, only_client) else s for to, s in enumerate(row))
        for one, row in enumerate(send)
    )
    names = _unique_names(ring)
    devices = tuple(
        PlannedDevice(name, one.memory, one.speed(model, dtype)) for name, one in zip(names, ring, strict=True)
    )
    fixed = not can_try_all_orders(len(devices), model.blocks)
    group = DeviceGroup(devices, model, cache_tokens, send, latency, fixed)
    return RingGroup(group, tuple(one.key for one in ring))


def best_plan(ring: RingGroup) -> PipelinePlan:
    """The fastest plan in which workers hold at least one block. Raises `NotEnoughMemory` if there is none."""
    plan = partition(ring.group)
    if len(plan.stages) == 1 and plan.stages[0].device is ring.group.devices[STARTER]:
        plan = partition(_without_room_for_all(ring.group))
        plan = ring.pipeline_plan(ring.ring_plan(plan))  # with the starter's true memory
    return plan


def told_plan(ring: RingGroup, numbers: Sequence[int]) -> RingPlan:
    """The plan of `--partition`, for the workers in the order in which they are given.

    Args:
        numbers: the starter's blocks, and those of each worker; see `parse_partition`.

    Raises `PartitionError` if they do not fit the model or the workers.
    """
    workers, blocks = ring.keys[STARTER + 1 :], ring.group.model.blocks
    said = "+".join(map(str, numbers))
    if len(numbers) != len(workers) + 1:
        raise PartitionError(
            f"--partition {said} is for {len(numbers) - 1} workers, and there are {len(workers)}: give the starter's "
            "blocks first (0 for none), and then those of each worker"
        )
    if sum(numbers) != blocks:
        raise PartitionError(
            f"--partition {said} makes {sum(numbers)} blocks, and {ring.group.model.name} has {blocks}"
        )
    if min(numbers[1:]) < 1:
        raise PartitionError(f"--partition {said} gives a worker no block: leave that worker out of --workers")
    parts, start = [], numbers[0]
    for worker, count in zip(workers, numbers[1:], strict=True):
        parts.append(RingPart(worker, Span(start, start + count)))
        start += count
    return RingPlan(numbers[0], tuple(parts))


def parse_partition(text: str) -> tuple[int, ...]:
    """Read `2+5+5`. Raises `PartitionError`."""
    if not re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})+", text.strip()):
        raise PartitionError(
            f"--partition {text}: give numbers of blocks such as 2+5+5, the starter's first (0 for none), and then "
            "those of each worker"
        )
    return tuple(map(int, text.split("+")))


def resumed_plan(holdings: Mapping[str, Holding | None], model: str, revision: str, blocks: int) -> RingPlan | None:
    """The plan that workers still follow, after their starter was started again; None if they follow none together.

    Args:
        holdings: what each worker is assigned.
    """
    held = {
        worker: one
        for worker, one in holdings.items()
        if one is not None and (one.model, one.revision) == (model, revision) and one.start < one.end
    }
    parts = sorted((RingPart(worker, Span(one.start, one.end)) for worker, one in held.items()), key=lambda p: p.span)
    edges = [part.span.start for part in parts[1:]] + [blocks]
    if not parts or [part.span.end for part in parts] != edges:
        return None
    return RingPlan(parts[0].span.start, tuple(parts))


def replan(ring: RingGroup, plan: RingPlan, present: Collection[str]) -> RingPlan | None:
    """What the workers that are left should hold; None if they cannot hold the model.

    The starter's blocks stay. Where it can be, so do the blocks of the workers that are left, and their neighbors or
    workers without blocks take what is missing: then only that has to be received.
    """
    kept = [part for part in plan.parts if part.worker in present]
    spares = [key for key in ring.keys[STARTER + 1 :] if key in present and key not in plan.workers]
    candidates = [_fill_gaps(ring, plan.local_blocks, kept, spares)] if spares else []
    candidates.append(_grow(ring, plan.local_blocks, kept))
    found = [one for one in candidates if one is not None]
    if found:
        return min(found, key=lambda one: _slowest(ring, one))
    return _plan_anew(ring, plan.local_blocks, present)


def _fill_gaps(ring: RingGroup, local: int, kept: Sequence[RingPart], spares: Sequence[str]) -> RingPlan | None:
    """Give each gap to a worker that has no blocks, as long as there are such workers; the rest as `_grow`."""
    left, parts = list(spares), list(kept)
    edges = [local, *(edge for part in kept for edge in (part.span.start, part.span.end)), ring.group.model.blocks]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        taker = next((one for one in left if start < end and _fits(ring, one, start, end)), None)
        if taker is not None:
            left.remove(taker)
            parts.append(RingPart(taker, Span(start, end)))
    return _grow(ring, local, sorted(parts, key=lambda part: part.span))


def _grow(ring: RingGroup, local: int, kept: Sequence[RingPart]) -> RingPlan | None:
    """Let each gap be taken by the workers beside it, cut where the slowest of them is quickest."""
    if not kept:
        return None
    lows = [local, *(part.span.end for part in kept[:-1]), ring.group.model.blocks]
    highs = [local, *(part.span.start for part in kept[1:]), ring.group.model.blocks]
    best: dict[int, tuple[float, tuple[int, ...]]] = {local: (0.0, ())}
    for number, part in enumerate(kept):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (slowest, ends) in best.items():
            for end in range(lows[number + 1], highs[number + 1] + 1):
                placed = ring.group.place(ring.keys.index(part.worker), start, end)
                if placed is not None:
                    option = max(slowest, placed.seconds), (*ends, end)
                    following[end] = min(following.get(end, option), option)
        best = following
    if not best:
        return None
    ((_, ends),) = best.values()
    starts = (local, *ends[:-1])
    spans = map(Span, starts, ends)
    return RingPlan(local, tuple(RingPart(part.worker, span) for part, span in zip(kept, spans, strict=True)))


def _plan_anew(ring: RingGroup, local: int, present: Collection[str]) -> RingPlan | None:
    """The best plan of the workers that are left, whatever they hold now."""
    indices = [number for number, key in enumerate(ring.keys) if number != STARTER and key in present]
    if not indices:
        return None
    rest = replace(ring.group, model=replace(ring.group.model, weights=ring.group.model.weights[local:]))
    for number in reversed(range(len(ring.keys))):
        if number not in indices:
            rest = rest.without(number)
    try:
        plan = partition(rest)
    except NotEnoughMemory:
        return None
    keys = {ring.group.devices[number].name: ring.keys[number] for number in indices}
    return RingPlan(
        local,
        tuple(
            RingPart(keys[stage.device.name], Span(stage.span.start + local, stage.span.end + local))
            for stage in plan.stages
        ),
    )


def _fits(ring: RingGroup, worker: str, start: int, end: int) -> bool:
    return ring.group.place(ring.keys.index(worker), start, end) is not None


def _slowest(ring: RingGroup, plan: RingPlan) -> float:
    placed = (ring.group.place(ring.keys.index(part.worker), part.span.start, part.span.end) for part in plan.parts)
    return max(one.seconds if one is not None else math.inf for one in placed)


def _without_room_for_all(group: DeviceGroup) -> DeviceGroup:
    """The same group, whose starter lacks the memory for the last block."""
    starter, needed = group.devices[STARTER], group.model.memory(0, group.model.blocks, group.cache_tokens)
    smaller = replace(starter, memory=min(starter.memory, int((needed - 1) / MAX_MEMORY_SHARE)))
    return replace(group, devices=(smaller, *group.devices[1:]))


def _unique_names(devices: Sequence[RingDevice]) -> list[str]:
    """Names to show; where two devices have the same, the ends of their peer ids are added."""
    names = [device.name for device in devices]
    return [
        name if names.count(name) == 1 else f"{name} …{device.key[-6:]}" if device.key else f"{name} (here)"
        for name, device in zip(names, devices, strict=True)
    ]
