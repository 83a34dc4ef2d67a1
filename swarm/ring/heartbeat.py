"""What both sides of a worker's stream have in common: each shows that it is there, and hears when the other is not."""

from __future__ import annotations

import asyncio

from swarm.errors import PeerTimeout, ProtocolViolation
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from swarm.transport.stream import Stream

HEARTBEAT_S = 2.0
"""Time between two signs of life."""

SILENCE_S = 10.0
"""A side that says nothing for so long has vanished. One whose process has ended is noticed at once."""

PAIRING_TIMEOUT_S = 10.0
"""How long each side may take to pair."""

MAX_PAYLOAD_BYTES = messages.MAX_PROBE_BYTES


async def show_life(stream: Stream) -> None:
    """Send a sign of life every few seconds, until cancelled. Raises `PeerLost`."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await stream.send(messages.StillHere())


async def receive(
    stream: Stream, timeout_s: float = SILENCE_S, max_payload: int = MAX_PAYLOAD_BYTES
) -> tuple[messages.WorkerMessage, Frame]:
    """The other side's next message, and the frame that it came in.

    Args:
        max_payload: bytes; what both sides say before they have paired has none.

    Raises:
        PeerTimeout: it said nothing for so long.
        PeerLost: the stream has ended.
        ProtocolViolation: it is not a message between a starter and a worker.
    """
    try:
        async with asyncio.timeout(timeout_s):
            frame = await stream.receive(max_payload)
    except TimeoutError:
        raise PeerTimeout(f"…{stream.peer_id[-6:]} has said nothing for {timeout_s:g} s") from None
    message = messages.decode_worker(frame.header)
    if len(frame.payload) and not isinstance(message, messages.ProbeRequest | messages.ProbeReply):
        raise ProtocolViolation(f"a {type(message).__name__} has no payload")
    return message, frame
