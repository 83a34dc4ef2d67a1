"""Hole punching: a direct TCP connection to a peer that others cannot dial (Ford, Srisuresh and Kegel, "Peer-to-Peer
Communication Across Network Address Translators", 2005, section 4).

A relay that both peers are connected to tells each where the other one comes from. Then both dial, each from the port
of those connections, so that the routers on the way take what comes in for answers.

The libp2p daemon has no option for this. If the daemons at both ends dialed, each would also take itself for the one
that dials in the handshake that follows. So one of both, mostly the peer that seeks the other, opens the TCP connection
itself, and passes the bytes on to the port where its daemon listens.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Any
from weakref import WeakValueDictionary

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import PeerLost, ProtocolViolation, RemoteError, RequestRefused, remote_error
from swarm.protocol import messages
from swarm.transport import daemon_streams
from swarm.transport.addresses import host_part, is_circuit, is_direct, port_part, sort_by_reach
from swarm.transport.dht.peer_networks import network_of_addresses
from swarm.transport.reach.heartbeat import BEAT_PERIOD_S, BEAT_TIMEOUT_S, Heartbeat
from swarm.transport.reach.reach_estimate import tcp_address
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
"""How long a relay may take to be connected to, and to tell where a peer can be dialed."""

HEAD_START_S = 0.1
"""The peer that dials waits so long, so that the other one has sent the packet that opens its router. Both hear from
the relay at about the same time. A packet that comes too early may be answered with a refusal, which ends the try."""

MIN_MEET_S, MEET_SHARE, MAX_MEET_S = 0.5, 3.0, 3.0
"""How long the other one tries to open the TCP connection before the relay is used: so long, and this many times what
it took to ask the relay, which says how far away and how busy everybody is; and no longer than the last."""

REFUSED_PAUSE_S, LOOK_PERIOD_S = 0.005, 0.05

RETRY_S = 600.0
"""After a try that failed, a peer is dialed through its relays only for so long. Some routers cannot be punched."""

MAX_FAILED = 1024

BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S = 32.0, 1.0
"""Requests that a relay passes on for the peers of one network (/24, /48)."""

MAX_NETWORKS = 4096

BURST, REFILL_PER_S = 32.0, 2.0
"""Connections that a peer opens because its relays say so."""

MAX_PUNCHED = 128
"""Connections of this kind that a peer has at a time."""

MIN_PORT = 1024
"""Peers do not listen below it, so that no relay can have the services of strangers dialed there."""

CHUNK_BYTES = 1 << 16

OpenStream = Callable[[str], Awaitable[FrameStream]]


class HolePuncher:
    """Connects to peers that cannot be dialed, helps others to do so, and lets itself be connected to.

    Args:
        p2p: this peer's daemon.
        open_stream: opens a stream for messages about reachability. Raises `RemoteError`.
        trusted_relays: ids of the relays that this peer has chosen: it dials where they say.
        is_hidden: whether this peer cannot be dialed and is sought, too, so that two may seek each other at once.
    """

    def __init__(
        self,
        p2p: P2P,
        open_stream: OpenStream,
        trusted_relays: Callable[[], Collection[str]],
        is_hidden: Callable[[], bool],
    ) -> None:
        self._p2p = p2p
        self._open_stream = open_stream
        self._trusted_relays = trusted_relays
        self._is_hidden = is_hidden
        self._own_id: str = p2p.peer_id.to_base58()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._failed_at = OrderedDict[str, float]()
        self._networks = TokenBuckets[str](BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S, MAX_NETWORKS)
        self._told = TokenBuckets[None](BURST, REFILL_PER_S, 1)
        self._real: dict[str, str] = {}
        """Where the peers come from whose connections this process passes on, by the address that the daemon sees."""
        self._meetings: dict[str, asyncio.Task[None]] = {}
        """By the address of the other peer. A second try at the same time would find the port in use."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, peer_id: str, circuits: Sequence[str], outer_host: str) -> None:
        """Connect to a peer that is announced at relays only: directly if that can be had, through a relay if not.

        Args:
            circuits: its addresses.
            outer_host: IP address at which it says that others see it.

        Raises the same as `daemon_streams.connect`.
        """
        async with self._turn(peer_id):  # or the second one would use a relay meanwhile
            if await self._addresses_of(peer_id):
                return
            failed_at = self._failed_at.get(peer_id)
            dials, began, direct = self._dials(peer_id), time.monotonic(), None
            if failed_at is None or began >= failed_at + RETRY_S:
                direct = await self._ask(peer_id, dials, circuits, outer_host)
            there = list(circuits)
            if direct is not None and dials:
                await asyncio.sleep(HEAD_START_S)
                there.insert(0, direct)  # which the daemon tries alone for half a second
            elif direct is not None:
                asked_s = time.monotonic() - began
                await self._be_dialed(peer_id, direct, min(MIN_MEET_S + MEET_SHARE * asked_s, MAX_MEET_S))
            try:
                await daemon_streams.connect(self._p2p, PeerID.from_base58(peer_id), list(map(Multiaddr, there)))
            finally:
                if direct is not None:
                    found = await self._addresses_of(peer_id)
                    self._note(peer_id, any("p2p-circuit" not in address for address in found))

    async def answer(self, request: messages.PunchRequest, stream: FrameStream, address: str) -> None:
        """Tell the peer at the other end, which comes from `address`, where another one can be dialed, and that one
        where this one is. Raises `PeerLost`."""
        try:
            asker = _public_address(address)
            if asker is None:
                raise RequestRefused("only a peer with a public IPv4 address, or a router that has one, can be dialed")
            now, network = time.monotonic(), network_of_addresses([Multiaddr(asker)])
            if self._networks.left(network, now) < 1:
                raise RequestRefused("too many requests to connect peers; wait a few seconds")
            self._networks.take(network, 1, now)
            found = map(_public_address, await self._addresses_of(request.peer_id))
            sought = next((one for one in found if one is not None), None)
            if sought is None:
                raise RequestRefused("this peer has no direct connection to the one that is sought")
            with closing(await self._open_stream(request.peer_id)) as other:
                await other.send(messages.Punch(stream.peer_id, asker, request.reverse))
        except (RequestRefused, PeerLost) as error:
            await stream.send(messages.refusal(error))
            return
        await stream.send(messages.PunchReply(sought))

    def receive(self, message: messages.Punch, sender: str) -> None:
        """A relay says from where another peer wants to be connected to this one: do this peer's part, in the
        background."""
        now = time.monotonic()
        if sender not in self._trusted_relays() or _public_address(message.address) is None:
            logger.debug(
                "ignoring a request from …%s: it is not one of this peer's relays, or its address is not public",
                sender[-6:],
            )
        elif len(self._meetings) >= MAX_PUNCHED or self._told.left(None, now) < 1:
            logger.debug("no connection to %s: there are enough, or too many at once", message.address)
        else:
            self._told.take(None, 1, now)
            if message.dial:
                self._run(self._dial(message.peer_id, message.address))
            else:
                self._meet(message.address)

    def real_address(self, address: str) -> str:
        """Where a peer comes from that the daemon sees at `address`."""
        return self._real.get(address, address)

    async def close(self) -> None:
        """End the connections that this process passes on, and watch no others."""
        tasks = [*self._tasks, *self._meetings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _dials(self, peer_id: str) -> bool:
        """Whether this peer is the one that dials where it seeks another one, which cannot be dialed.

        Of two of that kind, it is always the same one: if both dialed, neither connection would come about. A peer that
        may have no router is dialed: else it would take the packet that opens the other router for a connection.
        """
        return self._is_hidden() and self._own_id < peer_id

    def _turn(self, peer_id: str) -> asyncio.Lock:
        """Held while this peer connects to another one."""
        return self._turns.setdefault(peer_id, asyncio.Lock())

    async def _ask(self, peer_id: str, dials: bool, circuits: Sequence[str], outer_host: str) -> str | None:
        """Have a relay tell each of both peers where the other one comes from; where that is, or None."""
        relay_address, _, behind = next(filter(is_circuit, circuits)).partition("/p2p/")
        relay = behind.partition("/")[0]
        if relay == self._own_id:
            return None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await daemon_streams.connect(self._p2p, PeerID.from_base58(relay), [Multiaddr(relay_address)])
                with closing(await self._open_stream(relay)) as stream:
                    await stream.send(messages.PunchRequest(peer_id, reverse=not dials))
                    reply = messages.decode_reachability((await stream.receive(0)).header)
            if isinstance(reply, messages.Refusal):
                raise remote_error(reply.code, reply.message)
            if not isinstance(reply, messages.PunchReply) or _public_address(reply.address) is None:
                raise ProtocolViolation("it did not say where the peer comes from")
            if host_part(reply.address) != outer_host:
                raise ProtocolViolation("it sees the peer at another address than the peer itself announces")
        except (RemoteError, P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("relay …%s does not help to reach …%s directly: %s", relay[-6:], peer_id[-6:], error)
            return None
        return reply.address

    def _note(self, peer_id: str, is_direct: bool) -> None:
        self._failed_at.pop(peer_id, None)
        if is_direct:
            logger.debug("…%s is connected directly, although it cannot be dialed", peer_id[-6:])
            self._run(self._watch(PeerID.from_base58(peer_id)))
            return
        self._failed_at[peer_id] = time.monotonic()
        if len(self._failed_at) > MAX_FAILED:
            self._failed_at.popitem(last=False)

    async def _watch(self, peer: PeerID) -> None:
        """Close the connection to a peer when nothing comes over it any more."""
        heartbeat = None
        try:
            heartbeat = await Heartbeat.open(self._p2p, peer, BEAT_TIMEOUT_S)
            while True:
                await asyncio.sleep(BEAT_PERIOD_S)
                await heartbeat.beat(BEAT_TIMEOUT_S)
        except PeerLost as error:
            logger.debug("the direct connection to …%s: %s", str(peer)[-6:], error)
            if heartbeat is None or not heartbeat.has_ended:
                with suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
                    await self._p2p._client.disconnect(peer)
        finally:
            if heartbeat is not None:
                heartbeat.close()

    async def _addresses_of(self, peer_id: str) -> list[str]:
        """Where the connections to a peer lead; empty if there is none."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await daemon_streams.addresses_of(self._p2p, PeerID.from_base58(peer_id))
        except (P2PDaemonError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            return []

    async def _be_dialed(self, peer_id: str, address: str, timeout_s: float) -> None:
        """Meet a peer that is going to dial this one; returns when it is connected, or should have been."""
        meeting, deadline = self._meet(address, timeout_s), time.monotonic() + 2 * timeout_s  # for the handshake, too
        while not (meeting.done() or time.monotonic() >= deadline or await self._addresses_of(peer_id)):
            await asyncio.wait([meeting], timeout=LOOK_PERIOD_S)

    async def _dial(self, peer_id: str, address: str) -> None:
        """Connect to a peer that wants to be dialed by this one."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), self._turn(peer_id):
                await asyncio.sleep(HEAD_START_S)
                await daemon_streams.connect(self._p2p, PeerID.from_base58(peer_id), [Multiaddr(address)])
        except (P2PDaemonError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            logger.debug("…%s cannot be dialed at %s: %s", peer_id[-6:], address, error or "it does not answer")

    def _meet(self, address: str, timeout_s: float = MAX_MEET_S) -> asyncio.Task[None]:
        """Open a TCP connection to a peer that is dialing this one, within so long, and pass on what it carries."""
        if address not in self._meetings:
            task = asyncio.get_running_loop().create_task(self._meet_and_pass_on(address, timeout_s))
            self._meetings[address] = task
            task.add_done_callback(lambda _: self._meetings.pop(address))
        return self._meetings[address]

    async def _meet_and_pass_on(self, address: str, timeout_s: float) -> None:
        outer = await self._open(address, timeout_s)
        if outer is not None:
            await self._pass_on(outer, address)

    async def _open(self, address: str, timeout_s: float) -> socket.socket | None:
        """A TCP connection to a peer that is dialing this one; None if it does not come about."""
        try:
            async with asyncio.timeout(timeout_s):
                port = port_part(await self._listening_at())
                while True:
                    try:
                        return await _dial_from(port, address)
                    except ConnectionRefusedError:  # by a router that is not silent, before the other peer has dialed
                        await asyncio.sleep(REFUSED_PAUSE_S)
        except (P2PDaemonError, OSError, TimeoutError, LookupError, asyncio.IncompleteReadError) as error:
            logger.debug("no connection to %s: %s", address, error or "it does not answer")
            return None

    async def _pass_on(self, outer: socket.socket, address: str) -> None:
        """Be the way between a peer that comes from `address` and this peer's daemon."""
        try:
            here = await self._listening_at()
            outer_ends = await asyncio.open_connection(sock=outer, limit=CHUNK_BYTES)
            inner_ends = await asyncio.open_connection(host_part(here), port_part(here), limit=CHUNK_BYTES)
        except (P2PDaemonError, OSError, LookupError, asyncio.IncompleteReadError) as error:
            logger.debug("the connection to %s is of no use: %s", address, error)
            outer.close()
            return
        seen = tcp_address(*inner_ends[1].get_extra_info("sockname")[:2])
        self._real[seen] = address
        try:
            await asyncio.gather(
                daemon_streams.carry(outer_ends[0], inner_ends[1]), daemon_streams.carry(inner_ends[0], outer_ends[1])
            )
        finally:
            del self._real[seen]

    async def _listening_at(self) -> str:
        """The address at which this process reaches its daemon as other peers do. Raises `LookupError` if none."""
        _, found = await self._p2p._client.identify()
        for address in reversed(sort_by_reach(map(str, found))):
            if address.startswith("/ip4/") and address.split("/")[3] == "tcp":
                return address
        raise LookupError("the daemon does not listen by IPv4")


async def _dial_from(port: int, address: str) -> socket.socket:
    """A TCP connection to an address from a port at which the daemon listens, too. Raises `OSError`."""
    dialing = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        dialing.setblocking(False)
        dialing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Without the state of a closed connection, which would keep both from being connected again for a minute.
        dialing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dialing.bind(("", port))
        await asyncio.get_running_loop().sock_connect(dialing, (host_part(address), port_part(address)))
    except BaseException:
        dialing.close()
        raise
    return dialing


def _public_address(address: str) -> str | None:
    """The public TCP address of IPv4 that a multiaddress begins with; None if there is none, or if it is a relay's."""
    direct = "/".join(address.split("/")[:5])
    if "p2p-circuit" in address or not direct.startswith("/ip4/") or not is_direct(direct):
        return None
    return direct if ip_address(host_part(direct)).is_global and port_part(direct) >= MIN_PORT else None
