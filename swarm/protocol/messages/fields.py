"""What all messages share: types of fields, with the limits that decoders enforce, and how headers are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from swarm.errors import ProtocolViolation

MAX_SEQUENCES = 4096
"""Sequences that one step may carry. It bounds every list with one entry per sequence."""

MAX_BLOCKS_PER_REQUEST = 1024
"""Blocks that one message may name."""

MAX_PROBE_BYTES = 1 << 20
"""Bytes that one probe may carry in either direction."""

MAX_EXITS = 256
"""Blocks in front of which the tokens of one step may leave."""

MAX_PEER_SESSIONS = 256
"""Sessions that a server accepts of one peer, and streams. A part of its span counts as much as all of it: what a
session takes beside its cache (a stream, buffers, the last reply) does not depend on its blocks."""

MAX_STATEMENT_BYTES = 2048
"""Bytes of what a receipt says."""

MAX_SIGNATURE_BYTES = 1024
"""Bytes of a signature, and of the key that made it, as text."""

MAX_SHOWN_TABS = 4
"""Tabs that a client shows with a session (see `swarm.trust.points`)."""

ADAPTER_DIGEST_BYTES = 16

CHECKSUM_BYTES = 32

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 2)]
"""So that the number of the step behind is a `Count`, too."""

Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
PerSequence = Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
AdapterDigests = Annotated[
    list[Annotated[bytes, msgspec.Meta(max_length=ADAPTER_DIGEST_BYTES)]],
    msgspec.Meta(min_length=1, max_length=MAX_BLOCKS_PER_REQUEST),
]
"""The digest of each block's adapter, in order; empty bytes for a block without an adapter."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base class of all headers. A header is encoded as a msgpack array that begins with the class name."""


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encodes a message as the bytes of a header."""


def decoder(kinds: Any, what: str) -> Callable[[bytes], Any]:
    """A function that decodes the headers of one conversation, and raises `ProtocolViolation` for anything else."""
    decode = msgspec.msgpack.Decoder(kinds).decode

    def decode_or_refuse(header: bytes) -> Any:
        try:
            return decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"not {what}: {error}") from None

    return decode_or_refuse
