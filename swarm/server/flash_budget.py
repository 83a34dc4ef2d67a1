"""Whether blocks go to flash, and what then fits: `--flash`. Pure, but that it looks at the drive."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.common.units import ByteSize, format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.footprint import cache_bytes
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.preparation import check_space, drive_space
from swarm.models.flash.memory_shares import memory_needs
from swarm.models.flash.planned_blocks import PlannedBlock
from swarm.models.loading.flash_loading import FlashOptions
from swarm.models.weights.quantization import NONE
from swarm.server.memory_budget import usable

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
        cache_bytes_per_token: bytes that one position takes in the attention cache of one block at most.
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
    return FlashFootprint(blocks, max(cache_bytes(checkpoint.structure, dtype)))


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlashOption:
    """The `--flash` option: "auto" unless one of the fields is set.

    Attributes:
        off: all weights in memory.
        memory: bytes for weights; the others stay on flash.
    """

    off: bool = False
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> FlashOption:
        """Read `auto`, `off` or a size such as 8GB. Raises `InvalidOption`."""
        if text in ("auto", "off"):
            return cls(off=text == "off")
        try:
            return cls(memory=ByteSize.parse(text))
        except ValueError as error:
            raise InvalidOption(f"--flash {text}: use auto, off or the memory for weights; {error}") from None


def wants_flash(option: FlashOption, device: str, quantization: str, fits: bool) -> bool:
    """Whether the blocks that were asked for go to flash.

    "auto" is for blocks that fit in no other way: memory is faster than any drive, and quantized weights in memory are
    faster too.

    Args:
        device: type of the torch device.
        quantization: form of the weights.
        fits: whether the blocks fit in memory in that form.

    Raises:
        InvalidOption: flash was asked for, and this device or form cannot be read from it.
    """
    if option.off or (option.memory is None and (fits or device != "cpu" or quantization != NONE)):
        return False
    if device != "cpu":
        raise InvalidOption(f"--flash: weights are read from flash on a CPU only, not on {device}; add --device cpu")
    if quantization != NONE:
        raise InvalidOption(f"--flash: weights on flash are not quantized; use --quant none instead of {quantization}")
    return True


@dataclass(frozen=True)
class FlashBudget:
    """What a server's memory and drive hold of blocks on flash.

    Attributes:
        footprint: of the model's blocks.
        free: bytes of memory that are free before anything is loaded.
        cache_tokens: capacity of the attention cache.
        memory: bytes for weights, if `--flash` says so; None for what the cache leaves.
        packed: the model's packed files.
        exact: whether neurons are never selected.
    """

    footprint: FlashFootprint
    free: int
    cache_tokens: int
    memory: int | None
    packed: PackedModel
    exact: bool = False

    @property
    def usable(self) -> int:
        """Bytes for weights and attention cache."""
        return usable(self.free)

    @property
    def memory_text(self) -> str:
        """How much memory there is, for a log."""
        free = f"{format_bytes(self.free)} free"
        return free if self.memory is None else f"{format_bytes(self.memory)} for weights, of {free}"

    def options(self, span: Span) -> FlashOptions:
        """How to load a span."""
        return FlashOptions(self.weights(span.length), self.packed.root, self._planned(span))

    def weights(self, blocks: int) -> int:
        """Bytes for the weights of so many blocks."""
        return self.memory if self.memory is not None else self.usable - self._cache(blocks)

    def blocks_that_fit(self) -> int:
        """How many blocks it pays to serve, and the drive has room for. If the drive is the limit, it is logged.

        Raises `NotEnoughMemory` or `NotEnoughSpace` if not even one can be served.
        """
        paying = self._blocks_that_pay()
        held = self._blocks_on_drive(paying)
        if held == 0:
            check_space(self.packed, self._planned(Span(0, 1)))
        if held < paying:
            logger.warning(
                "Flash: %d blocks would pay, and the drive of %s has room for %d; free some space there, or "
                "choose another drive with --cache-dir",
                paying,
                self.packed.root,
                held,
            )
        return held

    def _blocks_that_pay(self) -> int:
        """How many blocks this memory is enough for, wherever the window lies. Raises `NotEnoughMemory` if not even one
        can be computed."""
        for count in range(len(self.footprint.blocks), 0, -1):
            if all(self._pays(span) for span in self._windows(count)):
                return count
        if not any(self._lacking(span) is None for span in self._windows(1)):
            self._check_memory(Span(0, 1))
        return 1

    def _blocks_on_drive(self, most: int) -> int:
        """How many blocks in a row the drive has room for, up to `most`, if they are the right ones: some may be
        prepared already. 0 if not even one. Raises `PackedFileError` if the drive cannot be looked at."""
        space = drive_space(self.packed)
        for count in range(most, 0, -1):
            if any(space.holds(self._planned(span)) for span in self._windows(count)):
                return count
        return 0

    def windows(self, count: int) -> list[Span]:
        """The windows of `count` blocks that can be served. Raises `PackedFileError` as above."""
        space = drive_space(self.packed)
        return [
            span for span in self._windows(count) if self._lacking(span) is None and space.holds(self._planned(span))
        ]

    def fits(self, requested: Span | int | None) -> bool:
        """Whether the blocks that were asked for can be computed in this memory: these, so many anywhere, or any."""
        count = min(requested or 1, len(self.footprint.blocks)) if not isinstance(requested, Span) else 0
        spans = [requested] if isinstance(requested, Span) else self._windows(count)
        return any(self._lacking(span) is None for span in spans)

    def check_fits(self, span: Span) -> None:
        """Raise `NotEnoughMemory` if the blocks cannot be computed in this memory, and `NotEnoughSpace` if the drive
        has no room for those that are not prepared yet."""
        self._check_memory(span)
        check_space(self.packed, self._planned(span))

    def _check_memory(self, span: Span) -> None:
        lacking = self._lacking(span)
        if lacking is not None:
            raise NotEnoughMemory(lacking)

    def _lacking(self, span: Span) -> str | None:
        """What memory lacks to compute these blocks; None if nothing."""
        least, weights = self.footprint.least_bytes(span.start, span.end), self.weights(span.length)
        cache = self._cache(span.length)
        if weights + cache <= self.usable and weights >= least:
            return None
        return (
            f"blocks {span} on flash take at least {format_bytes(least)} of memory for weights and "
            f"{format_bytes(cache)} for an attention cache of {self.cache_tokens} tokens; "
            f"{format_bytes(max(0, weights))} are for weights, of {format_bytes(self.usable)} that are free: serve "
            "fewer blocks, lower --cache-tokens, or give --flash another size"
        )

    def _pays(self, span: Span) -> bool:
        weights = self.weights(span.length)
        enough = weights >= self.footprint.worthwhile_bytes(span.start, span.end)
        return enough and weights + self._cache(span.length) <= self.usable

    def _windows(self, count: int) -> Iterator[Span]:
        return (Span(start, start + count) for start in range(len(self.footprint.blocks) - count + 1))

    def _planned(self, span: Span) -> dict[int, PlannedBlock]:
        return {block: self.footprint.blocks[block] for block in range(span.start, span.end)}

    def _cache(self, blocks: int) -> int:
        return blocks * self.cache_tokens * self.footprint.cache_bytes_per_token
