"""Frames: how a header and its payload are laid out in a byte stream.

    4 bytes  header length, big endian
    8 bytes  payload length, big endian
    header   one message of `swarm.protocol.messages`
    payload  tensor bytes, see `swarm.protocol.compression`

Both lengths are checked against limits before any of the following bytes are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from swarm.errors import ProtocolViolation

MAX_HEADER_BYTES = 128 * 1024
MAX_PAYLOAD_BYTES = 1 << 30
_PREFIX = struct.Struct(">IQ")
PREFIX_BYTES = _PREFIX.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One received message: encoded header and payload."""

    header: bytes
    payload: bytes | memoryview = b""


encode_prefix: Callable[[int, int], bytes] = _PREFIX.pack
"""Makes the twelve bytes that precede a frame, from the lengths of its header and its payload."""


def decode_prefix(prefix: bytes, max_payload: int = MAX_PAYLOAD_BYTES) -> tuple[int, int]:
    """Header length and payload length. Raises `ProtocolViolation` if one exceeds its limit."""
    header_length, payload_length = _PREFIX.unpack(prefix)
    if header_length > MAX_HEADER_BYTES:
        raise ProtocolViolation(
            f"a header of {header_length} bytes was announced; at most {MAX_HEADER_BYTES} are allowed"
        )
    if payload_length > max_payload:
        raise ProtocolViolation(f"a payload of {payload_length} bytes was announced; at most {max_payload} are allowed")
    return header_length, payload_length
