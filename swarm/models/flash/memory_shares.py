"""How memory is divided among the kinds of records of a span, its streamed blocks and its sparse layers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.common.units import format_bytes
from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.experts.attach import MIN_SLOTS
from swarm.models.flash.neurons.sparse_feed_forward import SLAB_BYTES
from swarm.models.flash.records import RecordLayout

MIN_NEURON_SHARE = 1 / 16
"""Share of the neurons that memory has room for at least. Tokens need about as many, so with less room some are read
several times for one token."""

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
        two_tokens: share of its neurons that two consecutive tokens need together.
    """

    count: int
    stride: int
    two_tokens: float


ROUNDING = 1e-9
"""Part of a neuron that a division may be short of by rounding."""


def divide_neurons(memory: int, layers: Sequence[NeuronNeed]) -> list[int]:
    """The neurons of each layer that `memory` bytes have room for; at least one.

    "LLM in a flash", section 3.1, keeps those of the same number of tokens in each layer, and some layers need several
    times as many for a token as others. So each gets memory in proportion to what two consecutive tokens need of it,
    and no more than it can use.
    """
    slots = [1] * len(layers)
    left = memory - sum(layer.stride for layer in layers)
    lacking = {number for number, layer in enumerate(layers) if layer.count > 1}
    while lacking and left > 0:
        wanted = {number: layers[number].two_tokens * layers[number].count for number in lacking}
        total = sum(want * layers[number].stride for number, want in wanted.items())
        rooms = {number: int(left * want / total + ROUNDING) for number, want in wanted.items()}
        full = {number for number in lacking if rooms[number] >= layers[number].count - 1}
        for number in full or lacking:
            slots[number] += min(rooms[number], layers[number].count - 1)
        left -= sum((layers[number].count - 1) * layers[number].stride for number in full)
        lacking = lacking - full if full else set()
    return slots


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
