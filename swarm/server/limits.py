"""Limits of a server that planning has to know as well."""

from __future__ import annotations

DEFAULT_CACHE_TOKENS = 16384
"""Default capacity of the attention cache, in tokens."""

KEPT_HIDDEN_STATES = 1
"""How often a session may keep the hidden states of a token beside its cache: in its last reply."""

MAX_DEFAULT_ADAPTER_BYTES = 1 << 30
"""Upper bound, in bytes, of the default memory for clients' adapters."""

DEFAULT_ADAPTER_SHARE = 0.05
"""Default memory for clients' adapters, as a share of the memory that is free before anything is loaded."""

DEFAULT_REQUEST_BYTES = 1 << 30
"""Bytes for requests on their way, where the memory of the machine was not asked."""

DEFAULT_REQUEST_SHARE = 0.05
"""Default memory for requests on their way, as a share of the memory that is free before anything is loaded."""

MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 64 << 20, 8 << 30
"""Bounds of this default, in bytes. The lower one is raised for large models, see `min_request_bytes`."""

REQUEST_PEER_SHARE = 0.5
"""Share of the memory for requests that one peer may have."""

MIN_REQUEST_TOKENS = 1024
"""Tokens of steps that one peer can have on their way at any server: two chunks of a prompt, or a piece of a replay."""

DECODED_BYTES = 4
"""Bytes of a value that was just decoded, at most."""

MAX_MEMORY_SHARE = 0.9
"""Share of the free memory that may be used. Activations, adapters and the allocator need the rest."""


def step_token_bytes(hidden_size: int, itemsize: int) -> int:
    """Memory that a token of a step takes beside its payload and its cache: inputs as decoded and as computed, outputs,
    and the reply, which is no larger than these.

    Args:
        itemsize: bytes of a number in the dtype of the blocks.
    """
    return hidden_size * (DECODED_BYTES + 3 * itemsize)


def min_request_bytes(hidden_size: int, itemsize: int) -> int:
    """The least memory for requests: one peer may have `MIN_REQUEST_TOKENS` on their way, whatever their format, and as
    many streams as it may open."""
    payload = 2 * DECODED_BYTES * hidden_size  # it exists twice for a moment
    tokens = MIN_REQUEST_TOKENS * (step_token_bytes(hidden_size, itemsize) + payload)
    return MIN_REQUEST_BYTES + int(tokens / REQUEST_PEER_SHARE)
