"""A client's connection to the swarm: its peer, its routes and its requests, for callers in any thread."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swarm.client.audits.auditor import Auditor
from swarm.client.batches.hop_requests import HopRequester
from swarm.client.batches.passes import PassContext
from swarm.client.chain.chain import Chain
from swarm.client.config import ClientConfig, ModelIdentity, RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.local_blocks import LocalBlocks
from swarm.client.points.wallet import Wallet
from swarm.client.routes.events import EventListener, broadcast
from swarm.client.routes.route_planner import RoutePlanner
from swarm.client.routes.route_source import MissingBlocksWait
from swarm.client.threads.network_thread import NetworkThread
from swarm.client.wire.adapter_upload import AdapterUpload, PackedAdapter
from swarm.common.warn_once import WarnOnce
from swarm.data_structures import ServerInfo, Span
from swarm.dht.validation import AnnouncementValidator
from swarm.protocol.messages import Receipt
from swarm.routing.batch_split import BatchShare
from swarm.routing.suspicion import Opinion
from swarm.transport.p2p import P2PConfig, Peer
from swarm.trust.opinion_file import OpinionFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

RELEASE_TIMEOUT_S = 2.0
"""Seconds that a client which ends waits for servers to free its sessions."""


class SwarmConnection:
    """The connection of one model's client to the swarm. Its methods may be called from any thread.

    It owns the network thread and what lives in it. A session makes a `Chain` with `new_chain`, a batch without a
    session makes a `PassContext` with `new_pass`; both run their coroutines with `run`.

    Args:
        config: the configuration of the client.
        model: the model that servers have to offer.
        local: the first blocks, if the client computes them itself.

    Attributes:
        identity: the model that servers have to offer.
        blocks: number of blocks of the whole model.
        span: the blocks that servers compute.
        warn_once: for what all sessions may have the same reason to say.
        close: disconnects; also called at interpreter exit.
    """

    def __init__(self, config: ClientConfig, model: ModelIdentity, local: LocalBlocks | None = None) -> None:
        self.config = config
        self.identity = model
        self.blocks = model.blocks
        self.local = local
        self.span = Span(local.span.end if local is not None else 0, model.blocks)
        self.warn_once = WarnOnce(logger, f"{model.name}: ")
        self._listeners: list[EventListener] = []
        network = config.network
        self._options = RequestOptions(model.revision, config.wire, network.request_timeout, network.push)

        async def connect() -> tuple[Peer, RoutePlanner, HopRequester, Auditor, Wallet | None]:
            wallet = Wallet(Path(network.points)) if network.points is not None else None
            file = OpinionFile(Path(network.opinions)) if network.opinions is not None else None
            joining = P2PConfig(initial_peers=config.initial_peers, membership=config.membership)
            peer = await Peer.create(joining, AnnouncementValidator())
            emit = broadcast(self._listeners)
            planner = RoutePlanner(peer, config, model, emit)
            router = planner.router
            auditor = Auditor(lambda: router.usable(time.monotonic()), router.suspicions, network.audit, file, emit)
            return peer, planner, HopRequester(peer, self._options), auditor, wallet

        self._releases = _Releases()
        self._network_thread = NetworkThread()
        try:
            self._peer, self._planner, self._requester, self._auditor, self._wallet = self.run(connect())
        except BaseException:
            self._network_thread.close()
            raise
        # A finalizer, so that the daemon and its sockets are closed at interpreter exit as well.
        self.close: Callable[[], object] = weakref.finalize(
            self,
            _shutdown,
            self._network_thread,
            self._planner,
            self._requester,
            self._auditor,
            self._peer,
            self._releases,
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the network thread; see `NetworkThread.run`."""
        return self._network_thread.run(work)

    def release(self, chain: Chain) -> None:
        """Close a chain without waiting for that. It raises nothing."""
        self._network_thread.start(self._releases.add(chain))

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and belongs to this process."""
        return self._network_thread.is_usable

    def new_chain(
        self,
        max_length: int,
        adapter: PackedAdapter,
        listener: EventListener | None = None,
        early_exits: bool = False,
        kept_receipts: dict[bytes, Receipt] | None = None,
    ) -> Chain:
        """The chain of a new session over all remote blocks; it is not open yet.

        Args:
            max_length: maximum number of tokens of each sequence.
            adapter: what is added to the blocks.
            listener: receives the events of this session, besides the listeners of the connection.
            early_exits, kept_receipts: see `SessionContext`.
        """
        emit = broadcast([*self._listeners, *([listener] if listener is not None else [])])
        upload = AdapterUpload(adapter, self._requester.ledger)
        return Chain(
            SessionContext(
                self._peer,
                self._planner,
                self._options,
                self.span,
                max_length,
                upload,
                emit,
                early_exits=early_exits,
                kept_receipts=kept_receipts,
                samples=self._auditor if self.config.network.audit else None,
                wallet=self._wallet,
            )
        )

    def new_pass(self, adapter: PackedAdapter, keep_inputs: bool = True) -> PassContext:
        """The context of a forward or backward pass without a session.

        Args:
            adapter: what is added to the blocks.
            keep_inputs: keep the inputs of every hop for a backward pass.
        """
        return PassContext(self._requester, self._planner, adapter, keep_inputs)

    def add_listener(self, listener: EventListener) -> None:
        """Send `listener` the events of all later sessions, and those of servers that are avoided."""
        self._listeners.append(listener)

    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers that this client can use now, as announced in the DHT."""
        self.run(self._planner.refresh())
        return self._planner.servers

    def opinions(self) -> dict[str, Opinion]:
        """What this client believes of servers, from its audits: peer id -> opinion (docs/trust.md)."""

        async def read() -> dict[str, Opinion]:
            now = time.monotonic()
            return {peer: one.at(now) for peer, one in self._planner.router.suspicions.beliefs.servers.items()}

        return self.run(read())

    def boundaries(self) -> tuple[int, ...]:
        """Blocks at which servers begin or end now, ascending: where routes may be cut."""
        edges = {edge for server in self.servers() for edge in (server.span.start, server.span.end)}
        return tuple(sorted(edges - {0, self.blocks}))

    def stage_count(self) -> int:
        """Stages of the route that a session would take now: its servers, and this client if it has local blocks.

        Waits for servers of missing blocks, then raises `MissingBlocks`.
        """

        async def count_servers() -> int:
            return len((await self._planner.route(self.span, None, None, 1)).hops)

        servers = self.run(MissingBlocksWait(self._planner).retry(count_servers))
        return servers + (self.local is not None)

    def split_batch(self, span: Span, token_counts: Sequence[int]) -> tuple[BatchShare, ...]:
        """The routes through `span` for a batch without a session, each with its share of the sequences.

        Waits for servers of missing blocks, then raises `MissingBlocks`.

        Args:
            token_counts: tokens of each sequence.
        """
        return self.run(MissingBlocksWait(self._planner).retry(lambda: self._planner.split(span, token_counts)))


class _Releases:
    """Chains that are being closed, so that a client which ends signs for them and has them audited."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, chain: Chain) -> None:
        task = asyncio.create_task(chain.close())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait([task])

    async def finish(self) -> None:
        """Wait until they are closed, but not for servers that do not answer."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_TIMEOUT_S)


def _shutdown(
    network_thread: NetworkThread,
    planner: RoutePlanner,
    requester: HopRequester,
    auditor: Auditor,
    peer: Peer,
    releases: _Releases,
) -> None:
    async def disconnect() -> None:
        await releases.finish()
        await auditor.close()
        requester.close()
        await planner.close()
        await peer.shutdown()

    network_thread.close(disconnect())
