"""Limits of a server that planning has to know as well."""

from __future__ import annotations

DEFAULT_CACHE_TOKENS = 16384
"""Default capacity of the attention cache, in tokens."""

KEPT_HIDDEN_STATES = 2
"""How often a session may keep the hidden states of a token beside its cache: in its last reply, and in a step that
waits for its next part."""

MAX_DEFAULT_ADAPTER_BYTES = 1 << 30
"""Upper bound, in bytes, of the default memory for clients' adapters."""

DEFAULT_ADAPTER_SHARE = 0.05
"""Default memory for clients' adapters, as a share of the memory that is free before anything is loaded."""

DEFAULT_REQUEST_BYTES = 1 << 30
"""Bytes for requests on their way, where the memory of the machine was not asked."""

DEFAULT_REQUEST_SHARE = 0.05
"""Default memory for requests on their way, as a share of the memory that is free before anything is loaded."""

MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 64 << 20, 8 << 30
"""Bounds of this default, in bytes."""

MAX_MEMORY_SHARE = 0.9
"""Share of the free memory that may be used. Activations, adapters and the allocator need the rest."""
