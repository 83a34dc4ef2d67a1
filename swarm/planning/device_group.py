"""Data types of planning: a closed group of devices, the model that it holds, and a plan. Pure.

The group forms a ring: the client sends a token's hidden state to the first device, each device to the next one, and
the last device back to the client. In every table of times, the last index is the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from swarm.data_structures import Span
from swarm.server.limits import MAX_MEMORY_SHARE

STREAM_BUFFERS = 2
"""Blocks in memory for those that are read from a drive: one is computed with, the next is read."""


@dataclass(frozen=True)
class PlannedDrive:
    """A drive on which a device can keep weights that its memory does not hold.

    Attributes:
        space: bytes that packed files may take.
        speed: bytes/s of random reads.
    """

    space: int
    speed: float


@dataclass(frozen=True)
class PlannedDevice:
    """A device that can hold blocks.

    Attributes:
        memory: bytes that are free for blocks and their attention cache.
        speed: blocks per second for one token (`throughput` of an announcement).
        drive: None if all weights have to be in memory.
    """

    name: str
    memory: int
    speed: float
    drive: PlannedDrive | None = None

    @property
    def usable_memory(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory * MAX_MEMORY_SHARE)


@dataclass(frozen=True)
class ModelSize:
    """The memory that a model's blocks take, and the size of its hidden state.

    Attributes:
        name: the model argument of `swarm server`; "" for the demo model.
        weights: bytes of each block's parameters.
        cache_per_token: bytes of one token in the attention cache of one block.
        hidden_bytes: bytes of one token's hidden state as it is sent.
    """

    name: str
    weights: tuple[int, ...]
    cache_per_token: int
    hidden_bytes: int

    @property
    def blocks(self) -> int:
        return len(self.weights)

    @cached_property
    def _weights_before(self) -> list[int]:
        return [0, *accumulate(self.weights)]

    def memory(self, start: int, end: int, cache_tokens: int) -> int:
        """Bytes of blocks [start, end) with a full cache of `cache_tokens` tokens."""
        weights = self._weights_before[end] - self._weights_before[start]
        return weights + (end - start) * cache_tokens * self.cache_per_token


@dataclass(frozen=True)
class PlacedBlocks:
    """What blocks take on a device.

    Attributes:
        seconds: for one token, reading from the drive included.
        memory: bytes of memory.
        on_drive: bytes of weights that memory does not hold; 0 if the drive is not used.
    """

    seconds: float
    memory: int
    on_drive: int


@dataclass(frozen=True)
class DeviceGroup:
    """A closed group of devices, their links, and the model that they hold.

    Attributes:
        send: seconds for which a device is busy sending a token's hidden state to another one, `[from][to]`.
        latency: seconds for which the hidden state then travels, `[from][to]`.
        fixed_order: the ring follows the listed order of the devices; otherwise the best order is searched.
        read_share: share of the weights on a drive that a token reads: 1 if it needs all of them.
    """

    devices: tuple[PlannedDevice, ...]
    model: ModelSize
    cache_tokens: int
    send: tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]
    fixed_order: bool = False
    read_share: float = 1.0

    @property
    def client_index(self) -> int:
        """The client's index in `send` and `latency`."""
        return len(self.devices)

    def place(self, device: int, start: int, end: int) -> PlacedBlocks | None:
        """Place blocks [start, end) on a device; None if they do not fit.

        With a drive, memory has to hold the attention cache and two blocks, of which one is computed with while the
        next is read. What it has room for beyond that is not read. Reading and computing are added up.
        """
        one, needed = self.devices[device], self.model.memory(start, end, self.cache_tokens)
        seconds, missing = (end - start) / one.speed, needed - one.usable_memory
        if missing <= 0:
            return PlacedBlocks(seconds, needed, 0)
        weights = self.model.weights[start:end]
        least = needed - sum(weights) + min(sum(weights), STREAM_BUFFERS * max(weights))
        if one.drive is None or least > one.usable_memory or sum(weights) > one.drive.space:
            return None
        return PlacedBlocks(seconds + missing * self.read_share / one.drive.speed, one.usable_memory, missing)

    def without(self, device: int) -> DeviceGroup:
        """The group without one device."""

        def cut(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(row[:device] + row[device + 1 :] for row in table[:device] + table[device + 1 :])

        rest = self.devices[:device] + self.devices[device + 1 :]
        return DeviceGroup(
            rest, self.model, self.cache_tokens, cut(self.send), cut(self.latency), self.fixed_order, self.read_share
        )


def link_tables(
    ends: int, hidden_bytes: int, link: Callable[[int, int], tuple[float, float]]
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Build `send` and `latency` of a group from the latency (seconds) and bandwidth (bytes/s) of each pair."""
    links = [[(0.0, math.inf) if a == b else link(a, b) for b in range(ends)] for a in range(ends)]
    send = tuple(tuple(hidden_bytes / bandwidth for _, bandwidth in row) for row in links)
    return send, tuple(tuple(latency for latency, _ in row) for row in links)


@dataclass(frozen=True)
class PipelineStage:
    """One device's part of a plan.

    Attributes:
        compute: seconds for one token in all blocks of the span, reading from the drive included.
        send: seconds for which the device is busy sending the result to the next stage.
        latency: seconds for which the result travels; meanwhile the device can compute another token.
        memory: bytes that blocks and cache take.
        on_drive: bytes of weights that are read from the drive, as far as a token needs them.
    """

    device: PlannedDevice
    span: Span
    compute: float
    send: float
    latency: float
    memory: int
    on_drive: int = 0

    @property
    def seconds(self) -> float:
        """Seconds for which one token occupies the device."""
        return self.compute + self.send


@dataclass(frozen=True)
class PipelinePlan:
    """A division of the blocks among devices: stages in the order of the ring, which hold every block once.

    Attributes:
        client_send: seconds for which the client is busy sending one token to the first stage.
        client_latency: seconds for which the token then travels.
    """

    stages: tuple[PipelineStage, ...]
    client_send: float
    client_latency: float

    @property
    def bottleneck(self) -> PipelineStage | None:
        """The slowest stage; None if the client's link is slower than every stage."""
        slowest = max(self.stages, key=lambda stage: stage.seconds)
        return slowest if slowest.seconds >= self.client_send else None

    @property
    def bottleneck_seconds(self) -> float:
        """Seconds between two tokens when enough sessions are active that the bottleneck never waits."""
        return max(self.client_send, *(stage.seconds for stage in self.stages))

    @property
    def token_seconds(self) -> float:
        """Seconds that one token takes around the ring with nothing else in flight."""
        stages = sum(stage.seconds + stage.latency for stage in self.stages)
        return self.client_send + self.client_latency + stages

    @property
    def pipeline_rate(self) -> float:
        """Tokens/s of all sessions together with a full pipeline."""
        return 1 / self.bottleneck_seconds

    @property
    def session_rate(self) -> float:
        """Tokens/s of a single session."""
        return 1 / self.token_seconds

    @property
    def sessions(self) -> int:
        """Number of concurrent sessions that fill the pipeline."""
        return math.ceil(self.token_seconds / self.bottleneck_seconds * (1 - 1e-9))
