"""Telling a peer that another one cannot dial it, by way of a third that has a connection; it then looks for itself.

A peer looks only every minute whether others still reach it. Whoever fails to dial it knows sooner. A notice proves
nothing, so all that follows is another look by the peer itself, and it is passed on over existing connections only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import RemoteError, RequestRefused
from swarm.protocol import messages
from swarm.transport import daemon_streams
from swarm.transport.dht.peer_networks import network_of_addresses
from swarm.transport.reach.dial_back import Notice, host_of
from swarm.transport.reach.reach_estimate import tcp_address
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

PEER_PERIOD_S = 60.0
"""How often one peer is told at most. Then a second time takes no longer than its own next look."""

MAX_PEERS = 1024

BURST, REFILL_PER_S = 4.0, 1 / 15
"""Notices that one peer sends about all others together. Servers that are gone need no notice."""

BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S = 8.0, 1 / 10
"""Notices that are passed on for the peers of one network."""

NOTICE_TIMEOUT_S = 10.0

OpenStream = Callable[[str], Awaitable[FrameStream]]


class Notices:
    """The notices that this peer sends, passes on, and gets.

    Args:
        p2p: this peer's daemon.
        initial_peers: ids of the peers by way of which others are told.
        open_stream: opens a stream for messages about reachability. Raises `RemoteError`.
        on_notice: called if another peer cannot dial this one, at most every `PEER_PERIOD_S`.
    """

    def __init__(
        self, p2p: P2P, initial_peers: Sequence[str], open_stream: OpenStream, on_notice: Callable[[], None]
    ) -> None:
        self._p2p = p2p
        self._initial_peers = tuple(initial_peers)
        self._open_stream = open_stream
        self._on_notice = on_notice
        self._told = TokenBuckets[str](1, 1 / PEER_PERIOD_S, MAX_PEERS)
        self._all_told = TokenBuckets[None](BURST, REFILL_PER_S, 1)
        self._networks = TokenBuckets[str](BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S, MAX_PEERS)
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, peer_id: str) -> None:
        """This peer has just failed to dial another one: have that told, in the background."""
        now = time.monotonic()
        if not self._initial_peers or peer_id in self._initial_peers:
            return
        if self._told.left(peer_id, now) < 1 or self._all_told.left(None, now) < 1:
            return
        self._told.take(peer_id, 1, now)
        self._all_told.take(None, 1, now)
        task = asyncio.get_running_loop().create_task(self._tell(peer_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def receive(self, message: Notice, sender: str, address: str) -> None:
        """Pass a notice about another peer on, act on one about this peer, or forget connections to the sender.

        Raises `RequestRefused` if there are too many, or if a notice to pass on comes through a relay.
        """
        match message:
            case messages.UnreachableNotice():
                await self._pass_on(message, address)
            case messages.LookAgain():
                self._on_look_again()
            case messages.ForgetConnections():
                with suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
                    await self._p2p._client.disconnect(PeerID.from_base58(sender))

    async def _pass_on(self, notice: messages.UnreachableNotice, address: str) -> None:
        now, network = time.monotonic(), network_of_addresses([Multiaddr(tcp_address(host_of(address), 1))])
        if self._networks.left(network, now) < 1:
            raise RequestRefused("too many notices about peers that cannot be dialed; wait a minute")
        self._networks.take(network, 1, now)
        if self._told.left(notice.peer_id, now) < 1 or not await self._is_connected_to(notice.peer_id):
            return
        self._told.take(notice.peer_id, 1, now)
        await self._send(notice.peer_id, messages.LookAgain())

    def _on_look_again(self) -> None:
        now, own_id = time.monotonic(), self._p2p.peer_id.to_base58()
        if self._told.left(own_id, now) >= 1:
            self._told.take(own_id, 1, now)
            self._on_notice()

    async def close(self) -> None:
        """Send no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, peer_id: str) -> None:
        for initial_peer in self._initial_peers:
            await self._send(initial_peer, messages.UnreachableNotice(peer_id))

    async def _send(self, peer_id: str, message: messages.UnreachableNotice | messages.LookAgain) -> None:
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT_S):
                with closing(await self._open_stream(peer_id)) as stream:
                    await stream.send(message)
        except (RemoteError, TimeoutError) as error:
            logger.debug("…%s was not told of a peer that cannot be dialed: %s", peer_id[-6:], error)

    async def _is_connected_to(self, peer_id: str) -> bool:
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT_S):
                return bool(await daemon_streams.addresses_of(self._p2p, PeerID.from_base58(peer_id)))
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return False
