"""Has the blocks of a span compute from records, each kind in its way, within one budget of memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.experts import attach as experts
from swarm.models.flash.experts.attach import ExpertBlock
from swarm.models.flash.flash_block import FlashBlock
from swarm.models.flash.flash_span import FlashSpan
from swarm.models.flash.memory_shares import memory_needs, share_memory
from swarm.models.flash.streaming.block_stream import BlockStream


def attach_blocks(
    blocks: Sequence[FlashBlock], memory: int, resident_bytes: int, files: ExitStack | None = None
) -> FlashSpan:
    """Put modules that compute from records into the blocks of a span.

    Args:
        blocks: in the order of the span.
        memory: bytes for all weights of the span.
        resident_bytes: those of its weights that always stay in memory.
        files: closed with the result.

    Raises:
        NotEnoughMemory: the blocks cannot be computed within `memory`.
        DriveFailed: what has to be in memory cannot be read.
    """
    by_kind: dict[RecordKind, list[FlashBlock]] = {}
    for one in blocks:
        by_kind.setdefault(one.plan.kind, []).append(one)
    needs = memory_needs([(one.plan.kind, one.store.layout) for one in blocks])
    shares = share_memory(memory - resident_bytes, needs)
    streamed = by_kind.get(RecordKind.BLOCK)
    stream = BlockStream(streamed, shares[RecordKind.BLOCK]) if streamed else None
    pools = []
    if RecordKind.EXPERTS in by_kind:
        pools = experts.attach([_expert_block(one) for one in by_kind[RecordKind.EXPERTS]], shares[RecordKind.EXPERTS])
    record_bytes = (stream.memory_bytes if stream is not None else 0) + sum(pool.buffer.nbytes for pool in pools)
    return FlashSpan(resident_bytes + record_bytes, [one.store for one in blocks], stream, pools, files or ExitStack())


def _expert_block(one: FlashBlock) -> ExpertBlock:
    return ExpertBlock(one.block, one.plan, one.taken, one.resident, one.store)
