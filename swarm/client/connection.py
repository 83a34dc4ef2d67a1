"""A client's connection to the swarm: the bridge from a person's threads to the network loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from swarm.client.batches.backward_pass import backward_batches
from swarm.client.batches.forward_pass import ForwardTrace, MicroBatch, PassContext, forward_batches
from swarm.client.batches.gradient_packing import HopGradients
from swarm.client.batches.hop_requests import HopRequester
from swarm.client.chain.chain import Chain
from swarm.client.chain.session_context import SessionContext
from swarm.client.config import ClientConfig
from swarm.client.local_blocks import LocalBlocks
from swarm.client.routes.events import EventListener, broadcast
from swarm.client.routes.route_planner import RoutePlanner
from swarm.client.routes.route_source import MissingBlocksWait
from swarm.client.threads.network_thread import NetworkThread
from swarm.client.wire.adapter_upload import AdapterUpload, PackedAdapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.request_options import RequestOptions
from swarm.data_structures import ServerInfo, Span, StepLayout
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import MissingBlocks
from swarm.routing import batch_split
from swarm.transport.p2p import P2PConfig, Peer


class SwarmConnection:
    """Connection of one model's client to the swarm; methods may be called from any thread.

    Args:
        config: see `ClientConfig`.
        model: the name that servers announce.
        revision: the client's revision of the model.
        blocks: number of blocks of the whole model.
        digests: right digest of every block, if the client knows them.
        local: the first blocks, if the client computes them itself.

    Attributes:
        span: the blocks that servers compute.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: str,
        revision: str,
        blocks: int,
        digests: Sequence[str] | None,
        local: LocalBlocks | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.local = local
        self.span = Span(local.span.end if local is not None else 0, blocks)
        self._listeners: list[EventListener] = []
        self._manner = RequestOptions(revision, config.wire, config.request_timeout, config.push)

        async def connect() -> tuple[Peer, RoutePlanner, HopRequester]:
            peer = await Peer.create(P2PConfig(initial_peers=config.initial_peers), AnnouncementValidator())
            planner = RoutePlanner(peer, config, model, revision, blocks, digests, broadcast(self._listeners))
            return peer, planner, HopRequester(peer, self._manner)

        self._background = NetworkThread()
        try:
            self._peer, self._planner, self._asker = self._background.run(connect())
        except BaseException:
            self._background.close()
            raise
        # Also at interpreter exit, so that the daemon and its sockets never stay behind.
        self.close: Callable[[], object] = weakref.finalize(
            self, _shutdown, self._background, self._planner, self._asker, self._peer
        )

    def listen(self, listener: EventListener) -> None:
        """Let `listener` hear of all sessions that begin from now on, and of servers that are avoided."""
        self._listeners.append(listener)

    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers that this client can use now, from the DHT."""
        self._background.run(self._planner.refresh())
        return self._planner.servers

    def stages(self) -> int:
        """Peers that a token goes through on the route that a session would take now, and this one if it has blocks.

        Waits for servers of missing blocks; raises `MissingBlocks`.
        """

        async def plan() -> int:
            waiting = MissingBlocksWait(self._planner)
            while True:
                try:
                    servers = len((await self._planner.route(self.span, None, None, 1)).hops)
                    return servers + (self.local is not None)
                except MissingBlocks as missing:
                    await waiting.wait(missing)

        return self._background.run(plan())

    def new_chain(self, max_length: int, adapter: PackedAdapter, listener: EventListener | None = None) -> Chain:
        """A session for `max_length` tokens a row over all remote blocks, with what `adapter` adds, not open yet.

        Args:
            listener: hears of this session.
        """
        tell = broadcast([*self._listeners, *([listener] if listener is not None else [])])
        carried = AdapterUpload(adapter, self._asker.sent)
        context = SessionContext(self._peer, self._planner, self._manner, self.span, max_length, carried, tell)
        return Chain(context)

    def open_chain(self, chain: Chain) -> None:
        """Find a session's servers. Raises `MissingBlocks` or a `RemoteError`.

        When this is interrupted the session may be open or not. So whoever opens one closes it, whatever came of it.
        """
        self._background.run(chain.open())

    def steps(self, chain: Chain, parts: Sequence[tuple[PackedHidden, StepLayout]]) -> list[PackedHidden]:
        """Steps of a session, one behind the other; see `Chain.steps`."""
        return self._background.run(chain.steps(parts))

    def resume_chain(self, chain: Chain) -> None:
        """Replace the servers that a session has lost."""
        self._background.run(chain.resume())

    def close_chain(self, chain: Chain) -> None:
        """Free a session on all its servers."""
        self._background.run(chain.close())

    def split(self, span: Span, token_counts: Sequence[int]) -> tuple[batch_split.BatchShare, ...]:
        """Which rows of a batch should go which way. Waits for servers of missing blocks; raises `MissingBlocks`."""

        async def split() -> tuple[batch_split.BatchShare, ...]:
            waiting = MissingBlocksWait(self._planner)
            while True:
                try:
                    return await self._planner.split(span, token_counts)
                except MissingBlocks as missing:
                    await waiting.wait(missing)

        return self._background.run(split())

    def forward(
        self, span: Span, batches: Sequence[MicroBatch], adapter: PackedAdapter, keeps: bool
    ) -> list[ForwardTrace]:
        """Run packed sequences through the blocks of `span`; see `swarm.client.batches.forward_pass`.

        Args:
            keeps: whether a way back may follow.
        """
        work = PassContext(self._asker, self._planner, adapter, keeps)
        return self._background.run(forward_batches(work, span, batches))

    def backward(
        self, passages: Sequence[ForwardTrace], gradients: Sequence[torch.Tensor], adapter: PackedAdapter, first: int
    ) -> list[HopGradients]:
        """The gradients of what went in, from those of what came out; see `swarm.client.batches.backward_pass`."""
        work = PassContext(self._asker, self._planner, adapter)
        return self._background.run(backward_batches(work, passages, gradients, first))


def _shutdown(background: NetworkThread, planner: RoutePlanner, asker: HopRequester, peer: Peer) -> None:
    async def leave() -> None:
        asker.close()
        await planner.close()
        await peer.shutdown()

    background.run(leave())
    background.close()
