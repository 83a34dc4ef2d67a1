"""Whether a connection still carries anything, and how long that takes."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing

from hivemind.p2p import P2P, P2PDaemonError, PeerID

from swarm.errors import PeerLost
from swarm.transport import daemon_streams

PING_PROTOCOL_ID = "/ipfs/ping/1.0.0"
"""By it every libp2p peer echoes what it is sent."""

PING_BYTES = 32

ECHO_TIMEOUT_S = 3.0
"""How long the echo may take by which the round trip is measured before a peer is dialed."""

BEAT_PERIOD_S, BEAT_TIMEOUT_S = 2.0, 8.0
"""How often each relay, and each peer that was connected to by hole punching, has to echo something, and how long it
may take. A router that has forgotten a connection, or has another address, says nothing: only silence tells. But an
echo waits for all that is queued before an uplink: some seconds at 1 Mbit/s."""


class Heartbeat:
    """A stream by libp2p's ping protocol that stays open on one connection, so that its end shows that the connection
    has ended.

    A daemon connects again by itself when a connection is lost. A relay forgets a peer's place with its connection, so
    it matters that the connection is the same one. Open it with `Heartbeat.open`.

    Attributes:
        round_trip_s: seconds that the last echo took; 0 before the first.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.round_trip_s = 0.0
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, p2p: P2P, peer: PeerID, timeout_s: float) -> Heartbeat:
        """On the connection that there is to the peer. Raises `PeerLost`."""
        try:
            async with asyncio.timeout(timeout_s):
                return cls(*await daemon_streams.open_stream(p2p, peer, PING_PROTOCOL_ID))
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise PeerLost(f"…{str(peer)[-6:]} cannot be pinged: {error or 'it does not answer'}") from None

    @property
    def has_ended(self) -> bool:
        """Whether the connection is known to have ended. An end that went unnoticed is found by `beat`."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def beat(self, timeout_s: float) -> None:
        """Have the peer echo some bytes. Raises `PeerLost`."""
        sent, began = os.urandom(PING_BYTES), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(sent)
                echo = await self._reader.readexactly(PING_BYTES)
        except TimeoutError:
            raise PeerLost(f"it has not answered for {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise PeerLost("the connection has ended") from None
        if echo != sent:
            raise PeerLost("it echoes other bytes than it was sent")
        self.round_trip_s = time.monotonic() - began

    def close(self) -> None:
        """End the stream, not the connection."""
        self._writer.transport.abort()


async def round_trip(p2p: P2P, peer_id: str) -> float:
    """Seconds that an echo takes on the connection there is to a peer; 0 if none comes."""
    try:
        with closing(await Heartbeat.open(p2p, PeerID.from_base58(peer_id), ECHO_TIMEOUT_S)) as heartbeat:
            await heartbeat.beat(ECHO_TIMEOUT_S)
    except PeerLost:
        return 0.0
    return heartbeat.round_trip_s
