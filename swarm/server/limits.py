"""Numbers that a server goes by, and that those who plan for servers have to know."""

from __future__ import annotations

DEFAULT_CACHE_TOKENS = 16384
"""Tokens of attention cache that a server has room for, if nothing else is asked for."""

MAX_DEFAULT_ADAPTER_BYTES = 1 << 30
"""Bytes of clients' adapters that a server has room for at most, if nothing else is asked for."""

DEFAULT_ADAPTER_SHARE = 0.05
"""Of the memory that is free before anything is loaded, for adapters, if nothing else is asked for."""

MAX_MEMORY_SHARE = 0.9
"""Share of the free memory that is used at most: activations, adapters and the allocator need the rest."""
