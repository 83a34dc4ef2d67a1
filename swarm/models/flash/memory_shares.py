"""How memory is divided among the kinds of records of a span, its streamed blocks and its sparse layers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.common.units import format_bytes
from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.experts.attach import MIN_SLOTS
from swarm.models.flash.neurons.predictor import Sparsity
from swarm.models.flash.neurons.sparse_feed_forward import SLAB_BYTES
from swarm.models.flash.records import RecordLayout

MIN_NEURON_SHARE = 1 / 16
"""Share of the neurons that memory has room for at least. Tokens need about as many, so with less room some are read
several times for one token."""

CURVE_POINTS = 64
"""Amounts of memory for which it is asked what a layer reads."""

PREDICTOR_RANK_DIVISOR = 8
"""The hidden size divided by the rank of a predictor, about: known only when it has been trained."""


@dataclass(frozen=True)
class MemoryNeed:
    """What the blocks of one kind need.

    Attributes:
        least: bytes with which they can be computed at all.
        whole: bytes with which nothing is read after loading.
    """

    least: int
    whole: int


def memory_needs(blocks: Sequence[tuple[RecordKind, RecordLayout]]) -> dict[RecordKind, MemoryNeed]:
    """What blocks of these kinds, with records of these layouts, need together."""
    by_kind: dict[RecordKind, list[RecordLayout]] = {}
    for kind, layout in blocks:
        by_kind.setdefault(kind, []).append(layout)
    return {kind: _NEEDS[kind](layouts) for kind, layouts in by_kind.items()}


def _experts_need(layouts: Sequence[RecordLayout]) -> MemoryNeed:
    least = sum(MIN_SLOTS * layout.stride for layout in set(layouts))
    return MemoryNeed(least, max(least, sum(layout.file_bytes for layout in layouts)))


def _streamed_need(layouts: Sequence[RecordLayout]) -> MemoryNeed:
    sizes = [layout.stride for layout in layouts]
    return MemoryNeed(needed_bytes(sizes), sum(sizes))


def slab_bytes(layouts: Sequence[RecordLayout]) -> int:
    """Bytes of each of the two slabs in which all neurons of a block are read for prompts."""
    return min(max(SLAB_BYTES, max(layout.stride for layout in layouts)), max(layout.file_bytes for layout in layouts))


def _neurons_need(layouts: Sequence[RecordLayout]) -> MemoryNeed:
    always = 2 * slab_bytes(layouts) + sum(_predictor_bytes(layout) for layout in layouts)
    records = sum(layout.file_bytes for layout in layouts)
    return MemoryNeed(always + int(records * MIN_NEURON_SHARE), always + records)


def _predictor_bytes(layout: RecordLayout) -> int:
    hidden = layout.fields[0].values
    return hidden // PREDICTOR_RANK_DIVISOR * (hidden + layout.count) * layout.dtype.itemsize


_NEEDS = {
    RecordKind.EXPERTS: _experts_need,
    RecordKind.NEURONS: _neurons_need,
    RecordKind.BLOCK: _streamed_need,
}


def share_memory(memory: int, needs: Mapping[RecordKind, MemoryNeed]) -> dict[RecordKind, int]:
    """Bytes for each kind: at least what it needs, and no more than it can use.

    Streamed blocks come first, because each byte of theirs in memory saves a byte of every forward; of experts and
    neurons some are needed rarely. These get equal shares of what they lack.

    Raises:
        NotEnoughMemory: `memory` bytes are less than all kinds need together.
    """
    least = sum(need.least for need in needs.values())
    if memory < least:
        raise NotEnoughMemory(
            f"{format_bytes(max(0, memory))} of memory are left for weights that are read from flash, and these blocks "
            f"need {format_bytes(least)}; allow more memory or serve fewer blocks"
        )
    shares = {kind: need.least for kind, need in needs.items()}
    left = memory - least
    for group in ({RecordKind.BLOCK}, {RecordKind.EXPERTS, RecordKind.NEURONS}):
        lacking = {kind: need.whole - need.least for kind, need in needs.items() if kind in group}
        total = sum(lacking.values())
        for kind, lack in lacking.items():
            shares[kind] += lack if total <= left else left * lack // total
        left = max(0, left - total)
    return shares


@dataclass(frozen=True)
class NeuronNeed:
    """A sparse layer that wants memory for neurons.

    Attributes:
        count: of its neurons.
        stride: bytes of a neuron in memory.
        sparsity: of what tokens need.
    """

    count: int
    stride: int
    sparsity: Sparsity

    @property
    def least(self) -> int:
        """Neurons that should have room: those of two tokens, so that hardly any token needs more than fit at once."""
        return math.ceil(self.count * max(MIN_NEURON_SHARE, self.sparsity.two_tokens))

    def read_bytes(self, slots: int) -> float:
        """Bytes that a token is expected to read with room for so many neurons."""
        return self.sparsity.read(slots / self.count) * self.count * self.stride


def divide_neurons(memory: int, layers: Sequence[NeuronNeed]) -> list[int]:
    """The neurons of each layer that `memory` bytes have room for, such that a token reads as few bytes as possible.

    Layers differ: some select four times as many neurons as others, and a layer that needs few has all that tokens keep
    coming back to in little memory. So each piece of memory goes where it saves the most bytes. A layer whose savings
    grow with a second piece gets both or none: its curve counts as the convex one below it.

    Each layer gets room for the neurons of two tokens, or its equal share if that is less.
    """
    equal = equal_shares(memory, layers)
    slots = [min(room, layer.least) for room, layer in zip(equal, layers, strict=True)]
    left = memory - sum(room * layer.stride for room, layer in zip(slots, layers, strict=True))
    pieces = sorted(
        (-saved, number, start, end)
        for number, layer in enumerate(layers)
        for start, end, saved in _pieces(layer, slots[number])
        if saved > 0
    )
    for _, number, start, end in pieces:
        if slots[number] == start:
            more = max(0, min(end - start, left // layers[number].stride))
            slots[number] += more
            left -= more * layers[number].stride
    divided = _with_rest(left, slots, layers)
    return min(divided, equal, key=lambda one: expected_bytes(one, layers))


def equal_shares(memory: int, layers: Sequence[NeuronNeed]) -> list[int]:
    """Room for one neuron of each layer, and for the same share of each layer's others."""
    others = sum((layer.count - 1) * layer.stride for layer in layers)
    left = max(0, min(others, memory - sum(layer.stride for layer in layers)))
    return [1 + (left * (layer.count - 1) // others if others else 0) for layer in layers]


def expected_bytes(slots: Sequence[int], layers: Sequence[NeuronNeed]) -> float:
    """Bytes that a token is expected to read in all layers."""
    return sum(layer.read_bytes(room) for room, layer in zip(slots, layers, strict=True))


def _pieces(layer: NeuronNeed, first: int) -> list[tuple[int, int, float]]:
    """Pieces of a layer's neurons, from `first` on: the first, the one behind the last, and the bytes that a token
    saves for each byte of memory, which becomes less from piece to piece."""
    step = max(1, math.ceil(layer.count / CURVE_POINTS))
    places = [*range(first, layer.count, step), layer.count]
    corners: list[tuple[int, float]] = []
    for point in ((place, layer.read_bytes(place)) for place in places):
        while len(corners) > 1 and _saved(corners[-2], corners[-1]) <= _saved(corners[-1], point):
            corners.pop()
        corners.append(point)
    return [(left[0], right[0], _saved(left, right) / layer.stride) for left, right in pairwise(corners)]


def _saved(left: tuple[int, float], right: tuple[int, float]) -> float:
    """Bytes saved by each neuron between two points of a curve."""
    return (left[1] - right[1]) / (right[0] - left[0])


def _with_rest(left: int, slots: Sequence[int], layers: Sequence[NeuronNeed]) -> list[int]:
    """Slots with what is left shared equally among neurons that lack room: nothing is expected of it."""
    lacking = [layer.count - room for room, layer in zip(slots, layers, strict=True)]
    total = sum(lack * layer.stride for lack, layer in zip(lacking, layers, strict=True))
    return [
        room + (max(0, min(total, left)) * lack // total if lack else 0)
        for room, lack in zip(slots, lacking, strict=True)
    ]


BUFFERS = 2
"""Blocks in memory for streaming: one is computed with, the next is read."""


def needed_bytes(sizes: Sequence[int]) -> int:
    """The least memory with which blocks of these sizes, in bytes, can be computed."""
    return min(sum(sizes), BUFFERS * max(sizes))


def choose_resident(sizes: Sequence[int], budget: int) -> tuple[bool, ...]:
    """Which of the blocks stay in memory: as many as `budget` bytes hold beside the buffers for the others.

    They are spread evenly among the others, so that the drive reads while they are computed.

    Raises:
        NotEnoughMemory: the budget is smaller than `needed_bytes`.
    """
    count = len(sizes)
    for kept in range(count, -1, -1):
        chosen = {(2 * number + 1) * count // (2 * kept) for number in range(kept)}
        if _taken_bytes(sizes, chosen) <= budget:
            return tuple(block in chosen for block in range(count))
    raise NotEnoughMemory(
        f"{format_bytes(budget)} of memory for weights are too little: streaming these blocks takes "
        f"{format_bytes(needed_bytes(sizes))}, {BUFFERS} times the largest one; allow more memory or serve fewer blocks"
    )


def _taken_bytes(sizes: Sequence[int], resident: set[int]) -> int:
    streamed = [size for block, size in enumerate(sizes) if block not in resident]
    return sum(sizes[block] for block in resident) + BUFFERS * max(streamed, default=0)
