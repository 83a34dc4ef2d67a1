"""How much of what a server reads it can expect to find in the page cache."""

from __future__ import annotations

COUNTED_SHARE = 0.5
"""Share of the free memory that is expected to stay free. Other programs may take it at any time."""


def page_cache_share(file_bytes: int, held_bytes: int, room_bytes: int, in_order: bool) -> float:
    """The share of the bytes that a server reads which is expected to be in the page cache. Pure.

    A server reads what it does not hold. The page cache has what was read last, but most of that the server holds too
    and does not read again. So only the room beyond what it holds counts. Records that are read in order come from a
    page cache that has room for all of them, or not at all: each one is gone before its turn comes again.

    Args:
        file_bytes: of all packed files.
        held_bytes: of these that the server keeps in memory.
        room_bytes: memory that the page cache can have when the server has its own; `COUNTED_SHARE` of it counts.
        in_order: whether what is not held is read in order, again and again, as streamed blocks are.
    """
    read, room = file_bytes - held_bytes, COUNTED_SHARE * room_bytes
    if read <= 0:
        return 0.0
    if in_order:
        return float(room >= read)
    return min(max((room - held_bytes) / read, 0.0), 1.0)
