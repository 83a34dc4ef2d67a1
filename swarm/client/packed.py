"""Hidden states as they travel, and what a client asks of every server."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import WireFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """Hidden states `[tokens, hidden_size]` as they travel."""

    payload: bytes | memoryview
    tokens: int
    hidden_size: int
    wire: WireFormat
    dtype: str


@dataclass(frozen=True)
class Manner:
    """What a client asks of every server.

    Attributes:
        revision: the model's revision.
        wire: format of the replies.
        timeout: seconds to wait for one answer at most; usually much less, see `swarm.client.patience`.
        push: let servers hand their outputs on to each other.
    """

    revision: str
    wire: WireFormat
    timeout: float
    push: bool = True
