"""How much memory blocks and their attention cache take, and how many fit. Figures are known before anything loads."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.footprint import Footprint
from swarm.server.limits import HEADROOM
from swarm.units import human


def blocks_that_fit(footprint: Footprint, free: int, cache_tokens: int) -> int:
    """How many blocks fit into `free` bytes wherever the window lies, with room for their attention cache.

    Raises `NotEnoughMemory` if not even one does.
    """
    budget = int(free * HEADROOM)
    per_block = max(footprint.weights) + cache_tokens * footprint.cache_per_token
    count = min(len(footprint.weights), budget // per_block)
    if count == 0:
        raise NotEnoughMemory(
            f"one block takes {human(per_block)} with its attention cache of {cache_tokens} tokens, and "
            f"{human(budget)} are free; lower --cache-tokens or use a smaller --dtype"
        )
    return count


def check_fits(footprint: Footprint, start: int, end: int, free: int, cache_tokens: int) -> None:
    """Raise `NotEnoughMemory` if blocks [start, end) do not fit into `free` bytes."""
    needed = footprint.of(start, end, cache_tokens)
    if needed > int(free * HEADROOM):
        raise NotEnoughMemory(
            f"blocks {start}:{end} take {human(needed)} with an attention cache of {cache_tokens} tokens, and "
            f"{human(int(free * HEADROOM))} are free; ask for fewer blocks or lower --cache-tokens"
        )


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
