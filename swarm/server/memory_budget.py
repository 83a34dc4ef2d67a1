"""How much memory blocks and their attention cache take, and how many fit. Known before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from swarm.common.dtypes import dtype_name
from swarm.common.machine import available_memory
from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.footprint import MemoryFootprint, is_faster_packed, memory_footprint, packed_bytes
from swarm.models.weights.quantization import INT8, NF4, NONE, PACKED, form_for_device, require_available
from swarm.server.limits import (
    DEFAULT_ADAPTER_SHARE,
    DEFAULT_REQUEST_SHARE,
    KEPT_HIDDEN_STATES,
    MAX_DEFAULT_ADAPTER_BYTES,
    MAX_MEMORY_SHARE,
    MAX_REQUEST_BYTES,
    min_request_bytes,
)

logger = logging.getLogger(__name__)


def usable(free: int) -> int:
    """How many of `free` bytes blocks and their attention cache may take."""
    return int(free * MAX_MEMORY_SHARE)


@dataclass(frozen=True)
class MemoryBudget:
    """What a server's memory holds of blocks whose weights are all in memory.

    Attributes:
        footprint: of the model's blocks.
        free: bytes of memory that are free before anything is loaded.
        cache_tokens: capacity of the attention cache.
    """

    footprint: MemoryFootprint
    free: int
    cache_tokens: int

    @property
    def usable(self) -> int:
        """Bytes for weights and attention cache."""
        return usable(self.free)

    @property
    def memory_text(self) -> str:
        """How much memory there is, for a log."""
        return f"{format_bytes(self.free)} free"

    def blocks_that_fit(self) -> int:
        """How many blocks fit wherever the window lies, with room for their attention cache.

        Raises `NotEnoughMemory` if not even one does.
        """
        footprint = self.footprint
        per_block = footprint.largest_block_bytes(self.cache_tokens)
        count = min(len(footprint.block_bytes), self.usable // per_block)
        if count <= 0:
            raise NotEnoughMemory(
                f"one block takes {format_bytes(per_block)} with its attention cache of {self.cache_tokens} tokens, "
                f"and {format_bytes(self.usable)} are free; lower --cache-tokens or use --quant nf4"
            )
        return count

    def windows(self, count: int) -> list[Span]:
        """The windows of `count` blocks that fit."""
        spans = (Span(start, start + count) for start in range(len(self.footprint.block_bytes) - count + 1))
        return [one for one in spans if self.footprint.span_bytes(one.start, one.end, self.cache_tokens) <= self.usable]

    def fits(self, requested: Span | int | None) -> bool:
        """Whether the blocks that were asked for fit: these, this many, or any at all (None)."""
        return self.fitting_blocks(requested) >= _enough(requested, len(self.footprint.block_bytes))

    def check_fits(self, span: Span) -> None:
        """Raise `NotEnoughMemory` if the blocks do not fit."""
        needed = self.footprint.span_bytes(span.start, span.end, self.cache_tokens)
        if needed > self.usable:
            raise NotEnoughMemory(
                f"blocks {span} take {format_bytes(needed)} with an attention cache of {self.cache_tokens} tokens, and "
                f"{format_bytes(self.usable)} are free; ask for fewer blocks, lower --cache-tokens or use --quant int8"
            )

    def fitting_blocks(self, requested: Span | int | None) -> int:
        """How many of the blocks fit. Of a requested span, all or none."""
        try:
            if isinstance(requested, Span):
                self.check_fits(requested)
                return requested.length
            return self.blocks_that_fit()
        except NotEnoughMemory:
            return 0


def resolve_quantization(
    requested: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    requested_blocks: Span | int | None,
    cache_tokens: int,
    reserved: int = 0,
) -> str:
    """The format in which weights will be held, see `swarm.models.weights.quantization`. It is logged.

    Args:
        requested: "none", "packed", "int8", "nf4", or "auto" for `choose_quantization`.
        reserved: bytes of the free memory that are needed for something else.

    Raises `InvalidOption` if this machine cannot compute with it.
    """
    if requested != "auto":
        form = form_for_device(device, requested)
        require_available(form, device)
        logger.info(
            "Weights: %s, as asked for%s", form, " (nf4 needs a GPU and bitsandbytes)" if form != requested else ""
        )
        return form
    free = free_memory(device) - reserved
    forms = _possible_forms(device)
    is_packed = PACKED in forms and packed_bytes(checkpoint, dtype) is not None
    is_fast = is_packed and is_faster_packed(checkpoint, dtype, device)
    forms = [form for form in forms if form != (INT8 if is_packed else PACKED)]  # packed weights lose nothing
    if is_fast:
        forms = [PACKED, *(form for form in forms if form != PACKED)]
    budgets = {form: MemoryBudget(memory_footprint(checkpoint, dtype, form), free, cache_tokens) for form in forms}
    form = choose_quantization(budgets, requested_blocks)
    said = "not quantized" if form == NONE else f"{form}, because not all requested blocks fit in {dtype_name(dtype)}"
    if form == PACKED and is_fast:
        said = "packed, as the checkpoint has them, which is also faster"
    logger.info("Weights: %s; --quant says otherwise", said)
    return form


def _possible_forms(device: torch.device) -> list[str]:
    """The formats that this machine can compute with, from exact to small."""
    forms = [NONE]
    for form in (PACKED, INT8, form_for_device(device, NF4)):
        with suppress(InvalidOption):
            require_available(form, device)
            forms.append(form)
    return forms


def choose_quantization(budgets: Mapping[str, MemoryBudget], requested: Span | int | None) -> str:
    """The format of the weights if none was requested: exact where the blocks fit, otherwise the first that fits.

    Args:
        budgets: by format, from exact to small.
        requested: these blocks, this many, or as many as possible (None). In the last case the smallest format is used
            only if no block fits in a better one.
    """
    fitting = {form: budget.fitting_blocks(requested) for form, budget in budgets.items()}
    if requested is None:
        *gentle, smallest = fitting
        best = max(gentle or [smallest], key=fitting.__getitem__)
        return best if fitting[best] else max(fitting, key=fitting.__getitem__)
    return next((form for form, budget in budgets.items() if budget.fits(requested)), NONE)


def _enough(requested: Span | int | None, blocks: int) -> int:
    if requested is None:
        return 1
    return min(requested, blocks) if isinstance(requested, int) else requested.length


def adapter_memory(requested: int | None, free: int) -> int:
    """Bytes for clients' adapters, of `free` bytes before anything is loaded."""
    return requested if requested is not None else min(MAX_DEFAULT_ADAPTER_BYTES, int(free * DEFAULT_ADAPTER_SHARE))


def request_memory(requested: int | None, free: int, hidden_size: int = 0, itemsize: int = 0) -> int:
    """Bytes for requests on their way, of `free` bytes before anything is loaded.

    Args:
        hidden_size, itemsize: of the model's hidden states. However small the machine is, a peer can send as much as
            clients send at once.
    """
    if requested is not None:
        return requested
    return min(max(min_request_bytes(hidden_size, itemsize), int(free * DEFAULT_REQUEST_SHARE)), MAX_REQUEST_BYTES)


def session_buffer_bytes(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, cache_tokens: int) -> int:
    """Memory that sessions may take beside their cache, for hidden states of as many tokens as the cache holds.

    A server on a GPU keeps them in other memory than blocks and cache.
    """
    hidden_size: int = checkpoint.config.get_text_config().hidden_size
    return 0 if device.type == "cuda" else KEPT_HIDDEN_STATES * cache_tokens * hidden_size * dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now; in a container, within its limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def resolve_device(requested: str) -> torch.device:
    """The device to compute on. Raises `InvalidOption` if this machine does not have it."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidOption(f"--device {requested}: torch cannot use it here ({reason})") from None
    return device
