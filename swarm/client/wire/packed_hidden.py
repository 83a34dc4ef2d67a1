"""Hidden states as they travel, and what a client asks of every server."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import WireFormat
from swarm.errors import NotFinite
from swarm.protocol.compression import is_finite


@dataclass(frozen=True, slots=True)
class PackedHidden:
    """Hidden states `[tokens, hidden_size]` as they travel."""

    payload: bytes | memoryview
    tokens: int
    hidden_size: int
    wire: WireFormat
    dtype: str

    def check(self) -> None:
        """Raise `NotFinite` if there is NaN or infinity in it, which no server takes."""
        if not is_finite(self.payload, self.tokens * self.hidden_size, self.wire, self.dtype):
            raise NotFinite("the hidden states to be sent hold NaN or infinity; look for it in what was put in")
