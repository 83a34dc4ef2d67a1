"""How much memory and how much of a drive blocks on flash take: known before anything is written or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.files.planned_blocks import plan_span
from swarm.models.flash.memory_shares import memory_needs
from swarm.models.flash.plans.block_choice import BlockPlanner
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.records.record_layout import RecordLayout

WORTHWHILE_SHARE = {RecordKind.NEURONS: 1 / 2, RecordKind.EXPERTS: 1 / 4, RecordKind.BLOCK: 1 / 2}
"""Share of the records for which there should be memory. "LLM in a flash" runs models of twice the memory; of experts,
most tokens find theirs among a quarter. With less memory, every token waits for the drive."""


@dataclass(frozen=True)
class FlashBlockSize:
    """One block.

    Attributes:
        kind, layout: of its records.
        resident_bytes: its other weights, which always stay in memory.
    """

    kind: RecordKind
    layout: RecordLayout
    resident_bytes: int


@dataclass(frozen=True)
class FlashFootprint:
    """All blocks of a model.

    Attributes:
        blocks: in order.
        cache_bytes_per_token: bytes that one position takes in the attention cache of one block.
    """

    blocks: Sequence[FlashBlockSize]
    cache_bytes_per_token: int

    def least_bytes(self, start: int, end: int) -> int:
        """Memory for weights with which blocks [start, end) can be computed at all."""
        needs = memory_needs([(block.kind, block.layout) for block in self.blocks[start:end]])
        return self._resident(start, end) + sum(need.least for need in needs.values())

    def worthwhile_bytes(self, start: int, end: int) -> int:
        """Memory for weights with which it pays to serve blocks [start, end)."""
        shares = (block.layout.file_bytes * WORTHWHILE_SHARE[block.kind] for block in self.blocks[start:end])
        return max(self.least_bytes(start, end), self._resident(start, end) + int(sum(shares)))

    def drive_bytes(self, start: int, end: int) -> int:
        """Bytes of the packed files of blocks [start, end)."""
        records = sum(block.layout.file_bytes for block in self.blocks[start:end])
        return records + self._resident(start, end)

    def sparse(self, start: int, end: int) -> bool:
        """Whether neurons are selected in any of the blocks [start, end)."""
        return any(block.kind is RecordKind.NEURONS for block in self.blocks[start:end])

    def _resident(self, start: int, end: int) -> int:
        return sum(block.resident_bytes for block in self.blocks[start:end])


def flash_footprint(checkpoint: Checkpoint, dtype: torch.dtype, exact: bool = False) -> FlashFootprint | None:
    """What the blocks of a checkpoint take in `dtype`; None if some cannot be on flash. No weights are read.

    Args:
        exact: never select neurons; see `block_choice`.
    """
    whole = Span(0, checkpoint.blocks)
    planned = plan_span(checkpoint, whole, dtype, BlockPlanner(exact).plan)
    if len(planned) < whole.length:
        return None
    blocks = [FlashBlockSize(one.plan.kind, one.layout, one.resident_bytes) for _, one in sorted(planned.items())]
    return FlashFootprint(blocks, checkpoint.structure.cached_values_per_token * dtype.itemsize)
