"""Hidden states encoded for the wire."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.common.large_payloads import run_large
from swarm.data_structures import WireFormat
from swarm.errors import NotFinite
from swarm.protocol.compression import is_finite

MAX_REQUEST_TOKENS = 8192
"""Tokens in one request. Longer prompts, larger batches and longer replays are sent in several requests."""


@dataclass(frozen=True, slots=True)
class PackedHidden:
    """Hidden states `[tokens, hidden_size]` encoded for the wire.

    Attributes:
        left: for each sequence, the block in front of which its token has left a server's span (0: it has not); None if
            no token has. The hidden states of a token that left are those in front of that block.
    """

    payload: bytes | memoryview
    tokens: int
    hidden_size: int
    wire: WireFormat
    dtype: str
    left: tuple[int, ...] | None = None

    async def require_finite(self) -> None:
        """Raise `NotFinite` if a value is NaN or infinite, which every server would refuse."""
        values, payload = self.tokens * self.hidden_size, self.payload
        if not await run_large(len(payload), is_finite, payload, values, self.wire, self.dtype):
            raise NotFinite("the hidden states to be sent contain NaN or infinity; check the inputs of the model")
