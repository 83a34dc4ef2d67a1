"""How much memory and how much of a drive blocks on flash take: known before anything is written or loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.files.planned_blocks import PlannedBlock
from swarm.models.flash.memory_shares import memory_needs
from swarm.models.flash.plans.block_plan import RecordKind

WORTHWHILE_SHARE = {RecordKind.NEURONS: 1 / 2, RecordKind.EXPERTS: 1 / 4, RecordKind.BLOCK: 1 / 2}
"""Share of the records for which there should be memory. "LLM in a flash" runs models of twice the memory; of experts,
most tokens find theirs among a quarter, if that are those of several tokens (`WORTHWHILE_TOKENS`). With less memory,
every token waits for the drive."""

WORTHWHILE_TOKENS = 4
"""Tokens for whose experts there should be memory, up to half of all experts."""


@dataclass(frozen=True)
class FlashFootprint:
    """All blocks of a model.

    Attributes:
        blocks: what of each is on flash, in order.
        cache_bytes_per_token: bytes that one position takes in the attention cache of one block.
    """

    blocks: Sequence[PlannedBlock]
    cache_bytes_per_token: int

    def least_bytes(self, start: int, end: int) -> int:
        """Memory for weights with which blocks [start, end) can be computed at all."""
        needs = memory_needs([(block.plan.kind, block.layout) for block in self.blocks[start:end]])
        return self._resident(start, end) + sum(need.least for need in needs.values())

    def worthwhile_bytes(self, start: int, end: int) -> int:
        """Memory for weights with which it pays to serve blocks [start, end)."""
        shares = (block.layout.file_bytes * _worthwhile_share(block) for block in self.blocks[start:end])
        return max(self.least_bytes(start, end), self._resident(start, end) + int(sum(shares)))

    def drive_bytes(self, start: int, end: int) -> int:
        """Bytes of the packed files of blocks [start, end)."""
        return sum(block.size for block in self.blocks[start:end])

    def sparse(self, start: int, end: int) -> bool:
        """Whether neurons are selected in any of the blocks [start, end)."""
        return any(block.plan.kind is RecordKind.NEURONS for block in self.blocks[start:end])

    def _resident(self, start: int, end: int) -> int:
        return sum(block.resident_bytes for block in self.blocks[start:end])


def _worthwhile_share(block: PlannedBlock) -> float:
    share = WORTHWHILE_SHARE[block.plan.kind]
    return max(share, min(1 / 2, WORTHWHILE_TOKENS * block.experts_per_token / block.layout.count))


def flash_footprint(
    checkpoint: Checkpoint, dtype: torch.dtype, planned: Mapping[int, PlannedBlock]
) -> FlashFootprint | None:
    """What the blocks of a checkpoint take in `dtype`; None if some cannot be on flash. No weights are read.

    Args:
        planned: what of each block is on flash; blocks of which nothing can be are missing.
    """
    if len(planned) < checkpoint.blocks:
        return None
    blocks = [one for _, one in sorted(planned.items())]
    return FlashFootprint(blocks, checkpoint.structure.cached_values_per_token * dtype.itemsize)
