"""How much memory blocks and their attention cache take, and how many fit. Figures are known before anything loads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.footprint import MemoryFootprint, memory_footprint
from swarm.models.weights.quantization import INT8, NF4, NONE, form_for_device, require_available
from swarm.protocol.compression import dtype_name
from swarm.server.limits import DEFAULT_ADAPTER_SHARE, MAX_DEFAULT_ADAPTER_BYTES, MAX_MEMORY_SHARE

logger = logging.getLogger(__name__)


def blocks_that_fit(footprint: MemoryFootprint, free: int, cache_tokens: int) -> int:
    """How many blocks fit into `free` bytes wherever the window lies, with room for their attention cache.

    Raises `NotEnoughMemory` if not even one does.
    """
    budget = int(free * MAX_MEMORY_SHARE)
    per_block = max(footprint.block_bytes) + cache_tokens * footprint.cache_bytes_per_token
    count = min(len(footprint.block_bytes), budget // per_block)
    if count == 0:
        raise NotEnoughMemory(
            f"one block takes {format_bytes(per_block)} with its attention cache of {cache_tokens} tokens, and "
            f"{format_bytes(budget)} are free; lower --cache-tokens or use --quant nf4"
        )
    return count


def check_fits(footprint: MemoryFootprint, start: int, end: int, free: int, cache_tokens: int) -> None:
    """Raise `NotEnoughMemory` if blocks [start, end) do not fit into `free` bytes."""
    needed = footprint.span_bytes(start, end, cache_tokens)
    if needed > int(free * MAX_MEMORY_SHARE):
        raise NotEnoughMemory(
            f"blocks {start}:{end} take {format_bytes(needed)} with an attention cache of {cache_tokens} tokens, and "
            f"{format_bytes(int(free * MAX_MEMORY_SHARE))} are free; ask for fewer blocks, lower --cache-tokens "
            "or use --quant int8"
        )


def resolve_quantization(
    requested: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    wanted: Span | int | None,
    cache_tokens: int,
    reserved: int = 0,
) -> str:
    """The form in which weights will be held, see `swarm.models.weights.quantization`. Says so in the log.

    Args:
        requested: "none", "int8", "nf4", or "auto" for `choose_quantization`.
        reserved: bytes of the free memory that are for something else.

    Raises `InvalidOption` if this machine cannot compute with it.
    """
    if requested != "auto":
        form = form_for_device(device, requested)
        require_available(form, device)
        logger.info("Weights: %s, as asked for%s", form, " (on a CPU nf4 is int4)" if form != requested else "")
        return form
    needs = {form: memory_footprint(checkpoint, dtype, form) for form in _possible_forms(device)}
    form = choose_quantization(needs, wanted, free_memory(device) - reserved, cache_tokens)
    said = "not quantized" if form == NONE else f"{form}, because not all blocks wanted fit in {dtype_name(dtype)}"
    logger.info("Weights: %s; --quant says otherwise", said)
    return form


def _possible_forms(device: torch.device) -> list[str]:
    """From exact to small."""
    forms = [NONE]
    for form in (INT8, form_for_device(device, NF4)):
        with suppress(InvalidOption):
            require_available(form, device)
            forms.append(form)
    return forms


def choose_quantization(
    footprints: Mapping[str, MemoryFootprint], wanted: Span | int | None, free: int, cache_tokens: int
) -> str:
    """The form of the weights where nobody asked for one: exact where the blocks fit, else what makes them fit.

    Args:
        footprints: by form, from exact to small.
        wanted: these blocks, so many, or as many as possible. For the latter nothing is squeezed into the smallest
            form that would be there in a better one.
    """
    blocks = len(next(iter(footprints.values())).block_bytes)
    rooms = {form: _room(needs, wanted, free, cache_tokens) for form, needs in footprints.items()}
    if wanted is None:
        *gentle, smallest = rooms
        best = max(gentle or [smallest], key=rooms.__getitem__)
        return best if rooms[best] else max(rooms, key=rooms.__getitem__)
    enough = min(wanted, blocks) if isinstance(wanted, int) else wanted.length
    return next((form for form, room in rooms.items() if room >= enough), next(iter(rooms)))


def _room(footprint: MemoryFootprint, wanted: Span | int | None, free: int, cache_tokens: int) -> int:
    """How many of the blocks fit; of blocks that were named, all or none."""
    try:
        if isinstance(wanted, Span):
            check_fits(footprint, wanted.start, wanted.end, free, cache_tokens)
            return wanted.length
        return blocks_that_fit(footprint, free, cache_tokens)
    except NotEnoughMemory:
        return 0


def adapter_memory(wanted: int | None, free: int) -> int:
    """Bytes for clients' adapters, of `free` bytes before anything is loaded."""
    return wanted if wanted is not None else min(MAX_DEFAULT_ADAPTER_BYTES, int(free * DEFAULT_ADAPTER_SHARE))


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now; in a container, within its limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _container_limit())


def _container_limit() -> int:
    """What the container may still use (cgroup v2), or a number beyond any memory where there is no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62


def resolve_device(requested: str) -> torch.device:
    """The device to compute on. Raises `InvalidOption` if this machine has it not."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidOption(f"--device {requested}: torch cannot use it here ({reason})") from None
    return device
