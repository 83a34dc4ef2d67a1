"""Has the blocks of a span compute from records, each kind in its way, within one budget of memory."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.models.flash.experts import attach as experts
from swarm.models.flash.flash_block import FlashBlock
from swarm.models.flash.flash_span import FlashSpan
from swarm.models.flash.memory_shares import NeuronNeed, divide_neurons, memory_needs, share_memory, slab_bytes
from swarm.models.flash.neurons import sparse_feed_forward
from swarm.models.flash.neurons.active_window import ForwardTokens
from swarm.models.flash.neurons.exact_pass import SlabMemory
from swarm.models.flash.neurons.sparse_feed_forward import SpanShared, SparseFeedForward, SparseOptions
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.streaming.block_stream import BlockStream


def attach_blocks(blocks: Sequence[FlashBlock], memory: int, resident_bytes: Sequence[int]) -> FlashSpan:
    """Put modules that compute from records into the blocks of a span.

    Args:
        blocks: in the order of the span.
        memory: bytes for all weights of the span.
        resident_bytes: of each block, the weights that always stay in memory.

    Raises:
        NotEnoughMemory: the blocks cannot be computed within `memory`.
        DriveFailed: what has to be in memory cannot be read.
    """
    by_kind: dict[RecordKind, list[FlashBlock]] = {}
    for one in blocks:
        by_kind.setdefault(one.plan.kind, []).append(one)
    needs = memory_needs([(one.plan.kind, one.store.layout) for one in blocks])
    shares = share_memory(memory - sum(resident_bytes), needs)
    streamed = by_kind.get(RecordKind.BLOCK)
    stream = BlockStream(streamed, shares[RecordKind.BLOCK]) if streamed else None
    pools = []
    if RecordKind.EXPERTS in by_kind:
        pools = experts.attach(by_kind[RecordKind.EXPERTS], shares[RecordKind.EXPERTS])
    layers: list[SparseFeedForward] = []
    shared = SpanShared(SlabMemory(0), ForwardTokens())
    if RecordKind.NEURONS in by_kind:
        sparse = by_kind[RecordKind.NEURONS]
        shared = SpanShared(SlabMemory(slab_bytes([one.store.layout for one in sparse])), ForwardTokens())
        layers = _attach_neurons(sparse, shares[RecordKind.NEURONS], shared)
    taken = (stream.memory_bytes if stream is not None else 0) + sum(pool.buffer.nbytes for pool in pools)
    taken += shared.slabs.nbytes + sum(layer.memory_bytes for layer in layers)
    return FlashSpan(sum(resident_bytes) + taken, blocks, resident_bytes, stream, pools, layers, shared)


def _attach_neurons(blocks: Sequence[FlashBlock], memory: int, shared: SpanShared) -> list[SparseFeedForward]:
    """Sparse layers, with memory for neurons where it saves most reads."""
    calibrated = [one.predictor for one in blocks if one.predictor is not None]
    assert len(calibrated) == len(blocks)
    predictors = [found.predictor.to(one.store.layout.dtype) for found, one in zip(calibrated, blocks, strict=True)]
    left = memory - shared.slabs.nbytes - sum(predictor.memory_bytes for predictor in predictors)
    layouts = [one.store.layout for one in blocks]
    needs = [
        NeuronNeed(layout.count, layout.stride, found.sparsity)
        for layout, found in zip(layouts, calibrated, strict=True)
    ]
    return [
        sparse_feed_forward.attach(
            one.block, one.plan, one.taken, one.resident, predictor, one.store, SparseOptions(slots), shared
        )
        for one, predictor, slots in zip(blocks, predictors, divide_neurons(left, needs), strict=True)
    ]
