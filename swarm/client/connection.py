"""A client's view of the swarm: who serves the model, and the routes through it."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence

from swarm.client.background import BackgroundLoop
from swarm.client.chain import Chain, Manner, Packed, forward
from swarm.client.config import ClientConfig
from swarm.data_structures import Route, ServerInfo, Span, StepLayout
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import MissingBlocks, PeerLost, ServerFault
from swarm.routing.compatibility import compatible_servers
from swarm.routing.shortest_path import hop_cost, shortest_route
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Routes that a request without a session tries before it gives up."""

ROUND_TRIP = 0.02
"""Seconds assumed for a round trip to any server."""


class SwarmConnection:
    """Connection of one model's client to the swarm; methods may be called from any thread.

    Args:
        config: see `ClientConfig`.
        model: the name that servers announce.
        revision: the client's revision of the model.
        blocks: number of blocks of the whole model.
        digests: right digest of every block, if the client knows them.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: str,
        revision: str,
        blocks: int,
        digests: Sequence[str] | None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self._model = model
        self._revision = revision
        self._digests = digests
        self._servers: tuple[ServerInfo, ...] = ()
        self._excluded: dict[str, str] = {}
        self._fetched = float("-inf")
        self._manner = Manner(revision, config.wire, config.request_timeout)
        self._background = BackgroundLoop()
        try:
            self._peer = self._background.run(
                Peer.create(P2PConfig(initial_peers=config.initial_peers), AnnouncementValidator())
            )
        except BaseException:
            self._background.close()
            raise
        # Also at interpreter exit, so that the daemon and its sockets never stay behind.
        self.close: Callable[[], object] = weakref.finalize(self, _shutdown, self._background, self._peer)

    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers that this client can use now, from the DHT."""
        self._background.run(self._refresh())
        return self._servers

    def open_chain(self, max_length: int) -> Chain:
        """A session for `max_length` tokens a row over all blocks. Raises `MissingBlocks` or a `RemoteError`."""
        return self._background.run(self._open_chain(max_length))

    def step(self, chain: Chain, hidden: Packed, layout: StepLayout) -> Packed:
        """One step of a session."""
        return self._background.run(chain.step(hidden, layout))

    def close_chain(self, chain: Chain) -> None:
        """Free a session on all its servers."""
        self._background.run(chain.close())

    def forward(self, span: Span, hidden: Packed, layout: StepLayout) -> Packed:
        """Run packed sequences through the blocks of `span`. A server that fails is avoided at the next attempt."""
        return self._background.run(self._forward(span, hidden, layout))

    async def _open_chain(self, max_length: int) -> Chain:
        failed: set[str] = set()
        for attempt in itertools.count(1):
            chain = Chain(self._peer, await self._route(Span(0, self.blocks), failed), self._manner, max_length)
            try:
                await chain.open()
                break
            except (PeerLost, ServerFault) as error:
                if attempt == ATTEMPTS:
                    raise
                failed |= chain.failed
                logger.info("%s; trying another route", error)
        return chain

    async def _forward(self, span: Span, hidden: Packed, layout: StepLayout) -> Packed:
        failed: set[str] = set()
        while True:
            route = await self._route(span, failed)
            result = hidden
            try:
                for hop in route.hops:
                    current = hop
                    result = await forward(self._peer, hop, self._manner, result, layout)
                return result
            except (PeerLost, ServerFault) as error:
                failed.add(current.server.peer_id)
                if len(failed) == ATTEMPTS:
                    raise
                logger.info("%s; trying another route", error)

    async def _route(self, span: Span, avoid: set[str] | frozenset[str] = frozenset()) -> Route:
        try:
            if time.monotonic() - self._fetched > self.config.refresh:
                await self._refresh()
            route = self._plan(span, avoid)
        except MissingBlocks:
            await self._refresh()  # a server may have come since
            route = self._plan(span, avoid)
        if self.config.show_route:
            print(route)
        return route

    def _plan(self, span: Span, avoid: set[str] | frozenset[str]) -> Route:
        servers = [server for server in self._servers if server.peer_id not in avoid]
        try:
            return shortest_route(servers, span, hop_cost(ROUND_TRIP))
        except MissingBlocks as error:
            raise MissingBlocks(error.blocks, self._why_missing()) from None

    def _why_missing(self) -> str:
        if not self._excluded:
            return f"no online server announces them for {self._model}"
        peer, reason = next(iter(self._excluded.items()))
        return f"{len(self._excluded)} server(s) cannot be used, such as …{peer[-6:]}: {reason}"

    async def _refresh(self) -> None:
        found = compatible_servers(
            await fetch_servers(self._peer.dht, self._model, self.blocks), self._revision, self._digests
        )
        self._servers, self._excluded = found.servers, found.excluded
        self._fetched = time.monotonic()


def _shutdown(background: BackgroundLoop, peer: Peer) -> None:
    background.run(peer.shutdown())
    background.close()
