"""Finds the best partition of a model over a closed group of devices, exactly, by dynamic programming. Pure.

Recurrent pipeline parallelism (MDI-LLM, section III-C): tokens of several sessions go around the ring at once, so the
slowest stage alone decides the throughput. A stage is busy while it computes its blocks for a token and while it sends
the result. Travel time delays a token but keeps no device busy.

The objectives, in this order: the fastest slowest stage, the fewest devices, the least time of one token around the
ring.

A state is (devices that cannot follow any more, device where the token is, number of blocks done). Without a fixed
order, the first part is the set of devices visited; with a fixed order, all devices up to the current one. So one
recursion serves both. The first pass finds the least possible time of the slowest stage. The second pass searches the
plans in which no stage is slower than that for the fewest devices and the fastest token. Two passes are needed because
a prefix of the fastest token's path need not be optimal for the slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import NotEnoughMemory
from swarm.planning.device_group import DeviceGroup, PipelinePlan, PipelineStage
from swarm.server.limits import MAX_MEMORY_SHARE

Array = NDArray[np.float64]
State = tuple[int, int]
"""(bit mask of the devices that cannot follow any more, device where the token is)."""

MAX_ADDITIONS = 600_000_000
"""Limit for a search over all orders: enough for 10 devices and a model of 80 blocks, in a few seconds."""


def can_try_all_orders(devices: int, blocks: int) -> bool:
    """Whether a group is small enough for the best order of its devices to be found."""
    additions: int = devices * (devices + 1) * (blocks + 1) ** 2 << devices
    return additions <= 2 * MAX_ADDITIONS


def partition(group: DeviceGroup, *, use_all_devices: bool = False) -> PipelinePlan:
    """Find the best plan.

    Args:
        use_all_devices: every device holds at least one block; otherwise devices that would not help get none.

    Raises:
        NotEnoughMemory: the blocks do not fit into the group.
    """
    client = group.client_index
    compute = [_compute_seconds(group, device) for device in range(client)]
    send, latency = np.array(group.send), np.array(group.latency)
    # stage[d][to, s, e]: seconds for which blocks [s, e) occupy device d that sends to `to`.
    stage = [compute[d] + send[d][:, None, None] for d in range(client)]
    counts = range(max(client, 1) if use_all_devices else 1, client + 1)

    first = _RingRecursion(group, stage, send[client], np.maximum)
    slowest = min(map(first.best_value, counts), default=np.inf)
    if slowest == np.inf:
        raise NotEnoughMemory(_explain_shortfall(group, first.max_blocks_placed()))
    delayed = [seconds + latency[d][:, None, None] for d, seconds in enumerate(stage)]
    allowed = [np.where(seconds <= slowest, delayed[d], np.inf) for d, seconds in enumerate(stage)]
    entry = np.where(send[client] <= slowest, send[client] + latency[client], np.inf)
    second = _RingRecursion(group, allowed, entry, np.add)
    fewest = next(count for count in counts if second.best_value(count) < np.inf)
    return _build_plan(group, second.walk_back(fewest))


def _explain_shortfall(group: DeviceGroup, placed: int) -> str:
    model, tokens = group.model, group.cache_tokens
    if placed == model.blocks:
        return f"not all of {len(group.devices)} devices can hold one of the {placed} blocks at the same time"
    total, missing = model.memory(0, model.blocks, tokens), model.memory(placed, model.blocks, tokens)
    budget = sum(device.usable_memory for device in group.devices)
    return (
        f"the {model.blocks} blocks take {format_bytes(total)} with an attention cache of {tokens} tokens and do not "
        f"fit: {format_bytes(budget)} can be filled ({MAX_MEMORY_SHARE:.0%} of the memory), with whole blocks only, so "
        f"blocks {placed}:{model.blocks} ({format_bytes(missing)}) find no place; "
        "add a device or memory, lower --cache-tokens, or give a device a drive"
    )


def _compute_seconds(group: DeviceGroup, device: int) -> Array:
    """[s, e] -> seconds for blocks [s, e) on the device; infinite if they do not fit or the range is empty."""
    blocks = group.model.blocks
    seconds = np.full((blocks + 1, blocks + 1), np.inf)
    for start in range(blocks):
        for end in range(start + 1, blocks + 1):
            placed = group.place(device, start, end)
            if placed is None:
                break
            seconds[start, end] = placed.seconds
    return seconds


@dataclass(frozen=True)
class _PlacedSpan:
    """A device's span in a plan, and the device that its output goes to."""

    device: int
    span: Span
    to: int


class _RingRecursion:
    """The dynamic program over all paths around the ring, device by device.

    `layers[k]` holds, for every state with k devices before the current one, the best value for each number of blocks
    done.

    Args:
        cost: `cost[d][to, s, e]` of blocks [s, e) on device d that sends to `to`; infinite where that is not allowed.
        entry: cost of the link from the client to each device.
        combine: computes the cost of a longer path from the cost of a path and of what is added to it.
    """

    def __init__(
        self, group: DeviceGroup, cost: list[Array], entry: Array, combine: Callable[[Array, Array], Array]
    ) -> None:
        self._group = group
        self._cost = cost
        self._combine = combine
        nothing_done = np.full(group.model.blocks, np.inf)
        start = {self._state(0, d): np.append(entry[d], nothing_done) for d in range(group.client_index)}
        self._layers: list[dict[State, Array]] = [start]
        self._finished: list[float] = []
        for _ in range(group.client_index):
            self._layers.append(self._advance(self._layers[-1]))

    def best_value(self, count: int) -> float:
        """The best value of a plan with `count` devices; infinite if there is none."""
        return self._finished[count - 1]

    def _state(self, closed: int, device: int) -> State:
        here = (2 << device) - 1 if self._group.fixed_order else 1 << device
        return closed | here, device

    def _advance(self, layer: dict[State, Array]) -> dict[State, Array]:
        client = self._group.client_index
        following: dict[State, Array] = {}
        finished = np.inf
        for (closed, device), before in layer.items():
            done = np.flatnonzero(before < np.inf)
            if not len(done):
                continue
            low, high = done[0], done[-1] + 1
            left = (closed + 1 & ~closed).bit_length() - 1  # the first device that may still follow, or the client
            after = self._combine(before[low:high, None], self._cost[device][left:, low:high, low:]).min(axis=1)
            finished = min(finished, after[-1, -1])
            for to in range(left, client):
                if closed >> to & 1:
                    continue
                state = self._state(closed, to)
                known = following.setdefault(state, np.full_like(before, np.inf))
                np.minimum(known[low:], after[to - left], out=known[low:])
        self._finished.append(float(finished))
        return following

    def walk_back(self, count: int) -> list[_PlacedSpan]:
        """The steps of the best plan with `count` devices, which must exist."""
        steps: list[_PlacedSpan] = []
        to, end, value = self._group.client_index, self._group.model.blocks, self.best_value(count)
        target: State | None = None
        for layer in reversed(self._layers[:count]):
            state, start = self._origin(layer, target, to, end, value)
            steps.append(_PlacedSpan(state[1], Span(start, end), to))
            target, to, end, value = state, state[1], start, float(layer[state][start])
        return steps[::-1]

    def _origin(
        self, layer: dict[State, Array], target: State | None, to: int, end: int, value: float
    ) -> tuple[State, int]:
        """Find the state and the number of blocks done that led to `value`, by repeating the same arithmetic."""
        for state, before in layer.items():
            closed, device = state
            if target is not None and (closed >> to & 1 or self._state(closed, to) != target):
                continue
            reached = self._combine(before, self._cost[device][to, :, end])
            found = np.flatnonzero(reached == value)
            if len(found):
                return state, int(found[0])
        raise AssertionError("every value of the recursion has an origin")

    def max_blocks_placed(self) -> int:
        """The largest number of blocks, counted from the first one, that can be placed."""
        reached = 0
        for layer in self._layers:
            for (_, device), before in layer.items():
                ends = self._combine(before[:, None], self._cost[device][-1])
                reached = max(reached, *np.flatnonzero(ends.min(axis=0) < np.inf), 0)
        return int(reached)


def plan_of(group: DeviceGroup, placed: Sequence[tuple[int, Span]]) -> PipelinePlan:
    """The plan that gives some devices, in this order, these blocks.

    Args:
        placed: index of each device in the group, and its blocks, which continue those of the one before.

    Raises `NotEnoughMemory`, which names the device that cannot hold its blocks.
    """
    followers = [device for device, _ in placed[1:]] + [group.client_index]
    return _build_plan(group, [_PlacedSpan(*one, to) for one, to in zip(placed, followers, strict=True)])


def _build_plan(group: DeviceGroup, steps: list[_PlacedSpan]) -> PipelinePlan:
    first = steps[0].device
    stages = tuple(_build_stage(group, step) for step in steps)
    return PipelinePlan(stages, group.send[group.client_index][first], group.latency[group.client_index][first])


def _build_stage(group: DeviceGroup, step: _PlacedSpan) -> PipelineStage:
    placed = group.place(step.device, step.span.start, step.span.end)
    if placed is None:
        device, needed = (
            group.devices[step.device],
            group.model.memory(step.span.start, step.span.end, group.cache_tokens),
        )
        raise NotEnoughMemory(
            f"{device.name} cannot hold blocks {step.span}: they take {format_bytes(needed)} with an attention cache "
            f"of {group.cache_tokens} tokens, and {format_bytes(device.usable_memory)} of its memory may be filled "
            f"({MAX_MEMORY_SHARE:.0%} of what is free); give it fewer blocks, lower --cache-tokens, or use --quant int8"
        )
    send, latency = group.send[step.device][step.to], group.latency[step.device][step.to]
    device = group.devices[step.device]
    return PipelineStage(device, step.span, placed.seconds, send, latency, placed.memory, placed.on_drive)
