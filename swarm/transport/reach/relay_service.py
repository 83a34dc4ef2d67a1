"""Relaying: places for peers behind routers, and the connections that others make to them.

This is the relay's part of libp2p's circuit relay v2. The daemon's own relay cannot be used: it starts two of them at
once, and mostly keeps the one with limits of 128 KiB and two minutes, which stop every session with a long history.

What is carried is encrypted between the two ends. Its bytes pass through this process, which bounds their rate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from multiaddr import Multiaddr

from swarm.common.token_buckets import RateLimit, TokenBuckets
from swarm.errors import ProtocolViolation
from swarm.transport import daemon_streams
from swarm.transport.dht.peer_networks import network_of_addresses
from swarm.transport.reach import circuit
from swarm.transport.reach.circuit import STOP_PROTOCOL_ID, HopMessage, Status, StopMessage
from swarm.transport.reach.dial_back import host_of

logger = logging.getLogger(__name__)

PLACE_S = 3600
"""For how long a place is granted; it can be renewed."""

PLACES_OF_HOUSEHOLD = 8
"""Places for one IPv4 address, or one /48 of IPv6."""

BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S = 64.0, 4.0
"""Requests of the peers of one network (/24, /48) at once, and then every second."""

MAX_NETWORKS = 4096

MAX_STREAMS = 256
"""Connections that are carried or asked for. If there are more, the network with the most of them loses one."""

CIRCUIT_S = 24 * 3600
CIRCUIT_BYTES = 1 << 36
"""How long one connection is carried, and how many bytes in each direction. The client then connects again, and goes
on where it was."""

BYTES_PER_S = 12.5e6
"""What all connections carry together, in both directions. Each gets the same share."""

REQUEST_TIMEOUT_S = 10.0
"""How long a peer may take to say what it wants."""

CONNECT_TIMEOUT_S = 10.0
"""How long the holder of a place may take to accept a connection."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Times are those of the monotonic clock."""

    household: str
    expires_at: float


class _Refused(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status.name.lower().replace("_", " "))
        self.status = status


class RelayService:
    """Grants places to peers, and carries connections to those that have one.

    Args:
        p2p: this peer's daemon.
        places: how many peers may hold a place; 0 to refuse all.
        circuit_bytes: what is carried over one connection in each direction.
        may_hold: whether a peer may hold a place, by its id.
    """

    def __init__(
        self,
        p2p: P2P,
        places: int,
        circuit_bytes: int = CIRCUIT_BYTES,
        may_hold: Callable[[str], bool] = lambda peer_id: True,
    ) -> None:
        self._p2p = p2p
        self._max_places = places
        self._circuit_bytes = circuit_bytes
        self._may_hold = may_hold
        self._places: dict[str, _Place] = {}
        self._streams: dict[asyncio.StreamWriter, str] = {}
        """The network of each, the oldest first."""
        self._requests = TokenBuckets[str](BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S, MAX_NETWORKS)
        self._rate = RateLimit(BYTES_PER_S, BYTES_PER_S / 4)

    async def serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and carry the connection that comes of it until it ends.

        Raises `ProtocolViolation`, `RequestRefused`, `IncompleteReadError` or `OSError`.
        """
        asker, address = info.peer_id, str(info.addr)
        try:
            household = _household(host_of(address))
            with self._counted(network_of_addresses([info.addr]), writer):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request = await circuit.receive(reader, HopMessage)
                kind = request.type if request.HasField("type") else None
                if kind == circuit.RESERVE:
                    _answer(writer, await self._reserve(asker.to_base58(), household))
                elif kind == circuit.CONNECT:
                    await self._connect(asker, request, reader, writer)
                else:
                    raise _Refused(Status.UNEXPECTED_MESSAGE)
        except _Refused as refused:
            logger.debug("…%s is not relayed: %s", asker.to_base58()[-6:], refused)
            _answer(writer, HopMessage(type=circuit.STATUS, status=refused.status))

    @contextmanager
    def _counted(self, network: str, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Charge a request, and count its stream. Raises `_Refused` if a network has too many of either."""
        now = time.monotonic()
        if self._requests.left(network, now) < 1:
            raise _Refused(Status.LIMIT_EXCEEDED)
        self._requests.take(network, 1, now)
        if len(self._streams) >= MAX_STREAMS:
            counts = Counter(self._streams.values())
            most, count = counts.most_common(1)[0]
            if count <= counts[network] + 1:
                raise _Refused(Status.LIMIT_EXCEEDED)
            newest = next(one for one in reversed(self._streams) if self._streams[one] == most)
            del self._streams[newest]
            newest.transport.abort()
        self._streams[writer] = network
        try:
            yield
        finally:
            self._streams.pop(writer, None)

    async def _reserve(self, asker: str, household: str) -> Any:
        """Grant a place; the answer. Raises `_Refused`."""
        if not self._max_places:
            raise _Refused(Status.RESERVATION_REFUSED)
        if not self._may_hold(asker):
            raise _Refused(Status.PERMISSION_DENIED)
        if not self._has_room(asker, household):
            await self._forget_those_gone()
        if not self._has_room(asker, household):
            raise _Refused(Status.LIMIT_EXCEEDED)
        self._places[asker] = _Place(household, time.monotonic() + PLACE_S)
        granted = {"expire": int(time.time()) + PLACE_S}
        return HopMessage(type=circuit.STATUS, status=Status.OK, reservation=granted, limit=self._limit())

    def _has_room(self, asker: str, household: str) -> bool:
        others = [place for peer, place in self._places.items() if peer != asker]
        of_household = sum(place.household == household for place in others)
        return len(others) < self._max_places and of_household < PLACES_OF_HOUSEHOLD

    async def _forget_those_gone(self) -> None:
        """Make the places free that have expired, or whose holders are not connected any more."""
        now, connected = time.monotonic(), await self._connected()
        self._places = {
            peer: place for peer, place in self._places.items() if place.expires_at > now and peer in connected
        }

    async def _connected(self) -> set[str]:
        """Ids of the peers with which this one is connected without a relay. Raises `_Refused`."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                peers = await self._p2p.list_peers()
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError):
            raise _Refused(Status.CONNECTION_FAILED) from None
        return {one.peer_id.to_base58() for one in peers if any("p2p-circuit" not in address for address in one.addrs)}

    async def _connect(
        self, asker: PeerID, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry a connection to the holder of a place until it ends. Raises `_Refused`, `IncompleteReadError`."""
        target = PeerID(request.peer.id)
        holder = target.to_base58()
        place = self._places.get(holder)
        if place is None or place.expires_at <= time.monotonic() or not self._may_hold(holder):
            raise _Refused(Status.NO_RESERVATION)
        if holder not in await self._connected():
            raise _Refused(Status.NO_RESERVATION)
        offer = StopMessage(type=circuit.STOP_CONNECT, peer={"id": asker.to_bytes()}, limit=self._limit())
        inner_reader, inner_writer = await self._offer(target, offer)
        try:
            _answer(writer, HopMessage(type=circuit.STATUS, status=Status.OK, limit=self._limit()))
            with suppress(TimeoutError):
                async with asyncio.timeout(CIRCUIT_S):
                    await asyncio.gather(self._carry(reader, inner_writer), self._carry(inner_reader, writer))
        finally:
            inner_writer.close()

    async def _offer(self, target: PeerID, offer: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to a peer that has accepted a connection over it. Raises `_Refused`."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await daemon_streams.open_stream(self._p2p, target, STOP_PROTOCOL_ID)
                try:
                    writer.write(circuit.encode(offer))
                    answer = await circuit.receive(reader, StopMessage)
                    if (answer.type, answer.status) != (circuit.STOP_STATUS, Status.OK):
                        raise ProtocolViolation("it does not accept the connection")
                except BaseException:
                    writer.transport.abort()
                    raise
        except (P2PDaemonError, ProtocolViolation, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("…%s cannot be connected to: %s", str(target)[-6:], error or "it does not answer")
            raise _Refused(Status.CONNECTION_FAILED) from None
        return reader, writer

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await daemon_streams.carry(reader, writer, self._wait, self._circuit_bytes)

    async def _wait(self, size: int) -> None:
        """Wait until it is the turn of so many bytes."""
        delay = self._rate.delay(size, time.monotonic())
        if delay > 0:
            await asyncio.sleep(delay)

    def _limit(self) -> dict[str, int]:
        return {"duration": CIRCUIT_S, "data": self._circuit_bytes}


def _answer(writer: asyncio.StreamWriter, message: Any) -> None:
    if not writer.is_closing():  # uvloop would raise
        writer.write(circuit.encode(message))


def _household(host: str) -> str:
    """An IPv4 address, or the /48 of an IPv6 address."""
    return host if ":" not in host else network_of_addresses([Multiaddr(f"/ip6/{host}")])
