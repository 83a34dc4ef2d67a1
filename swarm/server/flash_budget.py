"""Whether blocks go to flash, and what then fits: `--flash`. Pure, but for the memory and the files it is told of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.common.units import ByteSize, format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.flash.flash_footprint import FlashFootprint
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.loading.flash_loading import FlashOptions
from swarm.models.weights.quantization import NONE
from swarm.server.memory_budget import usable


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
    """What a server's memory holds of blocks on flash.

    Attributes:
        footprint: of the model's blocks.
        free: bytes of memory that are free before anything is loaded.
        cache_tokens: capacity of the attention cache.
        memory: bytes for weights, if `--flash` says so; None for what the cache leaves.
        root, io: see `FlashOptions`.
        exact: whether neurons are never selected.
    """

    footprint: FlashFootprint
    free: int
    cache_tokens: int
    memory: int | None
    root: Path
    io: FlashIo | None = None
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

    @property
    def description(self) -> str:
        """What distinguishes it from weights in memory and from other budgets."""
        size = format_bytes(self.memory) if self.memory is not None else "all memory"
        return f"on flash, {size}, {self.io or 'auto'}{', exact' if self.exact else ''}"

    def options(self, span: Span) -> FlashOptions:
        """How to load a span."""
        planned = dict(enumerate(self.footprint.blocks))
        return FlashOptions(self._weights(span.length), self.root, planned, self.io)

    def blocks_that_fit(self) -> int:
        """How many blocks it pays to serve, wherever the window lies. Raises `NotEnoughMemory` if not even one."""
        blocks = len(self.footprint.blocks)
        for count in range(blocks, 0, -1):
            spans = (Span(start, start + count) for start in range(blocks - count + 1))
            if all(self._pays(span) for span in spans):
                return count
        self.check_fits(Span(0, 1))
        return 1

    def fits(self, requested: Span | int | None) -> bool:
        """Whether the blocks that were asked for can be computed in this memory; with None, a single one."""
        blocks = len(self.footprint.blocks)
        span = requested if isinstance(requested, Span) else Span(0, min(requested or 1, blocks))
        try:
            self.check_fits(span)
        except NotEnoughMemory:
            return False
        return True

    def check_fits(self, span: Span) -> None:
        """Raise `NotEnoughMemory` if the blocks cannot be computed in this memory."""
        least, weights = self.footprint.least_bytes(span.start, span.end), self._weights(span.length)
        cache = self._cache(span.length)
        if weights + cache > self.usable or weights < least:
            raise NotEnoughMemory(
                f"blocks {span} on flash take at least {format_bytes(least)} of memory for weights and "
                f"{format_bytes(cache)} for an attention cache of {self.cache_tokens} tokens; "
                f"{format_bytes(max(0, weights))} are for weights, of {format_bytes(self.usable)} that are free: serve "
                "fewer blocks, lower --cache-tokens, or give --flash another size"
            )

    def _pays(self, span: Span) -> bool:
        weights = self._weights(span.length)
        enough = weights >= self.footprint.worthwhile_bytes(span.start, span.end)
        return enough and weights + self._cache(span.length) <= self.usable

    def _weights(self, blocks: int) -> int:
        return self.memory if self.memory is not None else self.usable - self._cache(blocks)

    def _cache(self, blocks: int) -> int:
        return blocks * self.cache_tokens * self.footprint.cache_bytes_per_token
