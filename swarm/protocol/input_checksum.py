"""The checksum of what a server has computed, which its client compares with what it knows that should have come.

It covers the whole header of the request (number, positions, rows, format, exits) and the bytes of the payload. The
bytes that one server pushes to the next are those of the client's copy, and both fill the header from the same step. So
the checksums of two honest peers are equal, with no tolerance. What was pushed is summed up as the `StepRequest` inside
the `PushRequest`.

SHA-256, cut to 16 bytes. A lying server chooses both texts, so the hash has to resist collisions; among those that do,
it is the quickest one on processors that have instructions for it: 2.1 GB/s, where blake2b has 1.4; 16 KiB take 9 µs.
"""

from __future__ import annotations

from hashlib import sha256

from swarm.protocol.messages import CHECKSUM_BYTES, ReplayRequest, StepRequest, encode


def input_checksum(request: StepRequest | ReplayRequest, payload: bytes | memoryview) -> bytes:
    """The checksum of a request and its payload, `CHECKSUM_BYTES` long.

    Lets other threads run while it reads a payload of more than two kilobytes.
    """
    header = encode(request)
    total = sha256(len(header).to_bytes(4, "big"))
    total.update(header)
    total.update(payload)
    return total.digest()[:CHECKSUM_BYTES]
