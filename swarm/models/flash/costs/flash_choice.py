"""Whether the swarm gains by blocks on flash that do not fit in memory. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FlashChoice:
    """Whether weights go to flash, and why, in words for the server's log."""

    flash: bool
    reason: str


def choose(wanted: int, fitting: int, memory_s: float, flash_s: float, hop_s: float) -> FlashChoice:
    """Whether the swarm gains if `wanted` blocks are held here on flash, of which memory holds `fitting`.

    What does not fit here has to be held by other servers. So a token's way through all wanted blocks is compared: on
    flash in one server, and in the memory of as many servers like this one as it takes, a hop away from each other.

    Args:
        memory_s, flash_s: seconds of a token through all wanted blocks.
        hop_s: seconds from one server to the next.
    """
    if fitting >= wanted:
        return FlashChoice(False, f"all {wanted} blocks fit in memory")
    if fitting == 0:
        return FlashChoice(True, "not one block fits in memory")
    servers = math.ceil(wanted / fitting)
    elsewhere_s = memory_s + (servers - 1) * hop_s
    return FlashChoice(
        flash_s <= elsewhere_s,
        f"a token takes {flash_s * 1000:.0f} ms through {wanted} blocks on flash, and {elsewhere_s * 1000:.0f} ms in "
        f"the memory of {servers} servers like this one",
    )
