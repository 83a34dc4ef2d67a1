"""Dialing another peer back, so that it learns whether it can be reached; and asking others to do that.

A peer is dialed at the IP address from which its own request comes, and nowhere else. So no peer can have strangers
dialed, and a peer that comes through a relay is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from multiaddr import Multiaddr

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import DialerBusy, PeerLost, ProtocolViolation, RequestRefused, remote_error
from swarm.protocol import messages
from swarm.transport.addresses import is_ip
from swarm.transport.dht.peer_networks import network_of_addresses
from swarm.transport.reach.dialer import DIAL_TIMEOUT_S, Dialer, dial_seconds
from swarm.transport.reach.hole_punching import HolePuncher
from swarm.transport.reach.reach_estimate import DialReport, tcp_address
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 12.0
"""How long a peer may take to dial this one back. Each port may take it up to nine seconds, all at the same time."""

REQUEST_TIMEOUT_S = 5.0
"""How long a peer that has opened a stream may take to say what it wants."""

BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S = 8.0, 1 / 15
"""Ports that are dialed for the peers of one network (/24, /48) at once, and then every second."""

BURST, REFILL_PER_S = 32.0, 1.0
"""Ports that are dialed for all peers together."""

MAX_NETWORKS = 4096


Notice = messages.UnreachableNotice | messages.LookAgain | messages.ForgetConnections


async def _ignore(notice: Notice, sender: str, address: str) -> None:
    pass


class DialBack:
    """Answers requests to dial back.

    Args:
        dialer: dials.
        round_trip: how many seconds an echo of a peer takes.
        on_notice: called with a notice instead; see `Notices.receive`.
        puncher: answers requests for hole punching; None to refuse them.
    """

    def __init__(
        self,
        dialer: Dialer,
        round_trip: Callable[[str], Awaitable[float]],
        on_notice: Callable[[Notice, str, str], Awaitable[None]] = _ignore,
        puncher: HolePuncher | None = None,
    ) -> None:
        self._dialer = dialer
        self._round_trip = round_trip
        self._on_notice = on_notice
        self._puncher = puncher
        self._networks = TokenBuckets[str](BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S, MAX_NETWORKS)
        self._all = TokenBuckets[None](BURST, REFILL_PER_S, 1)

    async def serve(self, stream: FrameStream, address: str) -> None:
        """Answer one request, or take one notice, from a stream that comes from the multiaddress `address`.

        Raises `PeerLost` or `ProtocolViolation`; also `RequestRefused` for too many notices, which get no answer.
        """
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                frame = await stream.receive(0)
        except TimeoutError:
            raise PeerLost(f"…{stream.peer_id[-6:]} did not say within {REQUEST_TIMEOUT_S:g} s what it wants") from None
        request = messages.decode_reachability(frame.header)
        if self._puncher is not None:
            address = self._puncher.real_address(address)
            if isinstance(request, messages.PunchRequest):
                await self._puncher.answer(request, stream, address)
                return
            if isinstance(request, messages.Punch):
                self._puncher.receive(request, stream.peer_id)
                return
        if isinstance(request, Notice):
            await self._on_notice(request, stream.peer_id, address)
            return
        if not isinstance(request, messages.DialBackRequest):
            raise ProtocolViolation("a request to dial back was due")
        try:
            host = host_of(address)
            ports = list(dict.fromkeys(request.ports))
            self._charge(host, len(request.ports))
            far_s = await self._round_trip(stream.peer_id) if ports else 0.0
            seconds = dial_seconds(DIAL_TIMEOUT_S, far_s)
            tries = (self._reaches(stream.peer_id, tcp_address(host, port), seconds) for port in ports)
            answers = await asyncio.gather(*tries)
        except RequestRefused as refused:
            await stream.send(messages.refusal(refused))
            return
        reached = [port for port, answered in zip(ports, answers, strict=True) if answered]
        await stream.send(messages.DialBackReply(host, reached))

    def _charge(self, host: str, ports: int) -> None:
        """Charge the dialing of so many ports. Raises `RequestRefused` if that is too much."""
        now, network = time.monotonic(), network_of_addresses([Multiaddr(tcp_address(host, 1))])
        if ports and (self._networks.left(network, now) < ports or self._all.left(None, now) < ports):
            raise RequestRefused("too many requests to dial back; wait a minute, or ask another peer")
        self._networks.take(network, ports, now)
        self._all.take(None, ports, now)

    async def _reaches(self, peer_id: str, address: str, seconds: float) -> bool:
        try:
            await self._dialer.dial(peer_id, address, seconds)
        except DialerBusy:
            raise RequestRefused("this peer is busy dialing others back; ask another peer") from None
        except PeerLost as error:
            logger.debug("%s", error)
            return False
        return True


def host_of(address: str) -> str:
    """The IP address from which a peer comes. Raises `RequestRefused` if it comes through a relay."""
    parsed = Multiaddr(address)
    host = next((parsed[name] for name in ("ip4", "ip6") if name in parsed), None)
    if host is None or "p2p-circuit" in parsed:
        raise RequestRefused("this peer cannot see where you come from, because you come through a relay")
    return str(host)


async def ask(stream: FrameStream, ports: list[int]) -> DialReport:
    """Ask the peer at the other end to dial this one back; with no ports only how it sees this peer.

    Raises `RemoteError`: the peer did not answer, refused, or said something that cannot be.
    """
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            await stream.send(messages.DialBackRequest(ports))
            frame = await stream.receive(0)
    except TimeoutError:
        raise PeerLost(f"…{stream.peer_id[-6:]} did not dial back within {ASK_TIMEOUT_S:g} s") from None
    reply = messages.decode_reachability(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"…{stream.peer_id[-6:]} refused to dial back: {reply.message}")
    if not isinstance(reply, messages.DialBackReply):
        raise ProtocolViolation(f"…{stream.peer_id[-6:]} did not say whether it could dial back")
    if not is_ip(reply.host):
        raise ProtocolViolation(f"…{stream.peer_id[-6:]} says that it sees this peer at what is not an IP address")
    return DialReport(str(ip_address(reply.host)), frozenset(reply.reached) & frozenset(ports))
