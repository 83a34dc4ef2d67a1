"""A client's connection to the swarm: the bridge from a person's threads to the network loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from swarm.client.batches.backward_pass import backward_all
from swarm.client.batches.forward_pass import MicroBatch, Pass, Passage, forward_all
from swarm.client.batches.gradient_packing import Gradients
from swarm.client.batches.hop_requests import Asker
from swarm.client.chain.chain import Chain
from swarm.client.chain.failover import Waiting
from swarm.client.config import ClientConfig
from swarm.client.local_blocks import LocalBlocks
from swarm.client.routes.events import Listener, to_all
from swarm.client.routes.route_planner import SwarmPlanner
from swarm.client.threads.network_thread import BackgroundLoop
from swarm.client.wire.adapter_upload import Carried, PackedAdapter
from swarm.client.wire.packed_hidden import Manner, Packed
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
        self._listeners: list[Listener] = []
        self._manner = Manner(revision, config.wire, config.request_timeout, config.push)

        async def connect() -> tuple[Peer, SwarmPlanner, Asker]:
            peer = await Peer.create(P2PConfig(initial_peers=config.initial_peers), AnnouncementValidator())
            planner = SwarmPlanner(peer, config, model, revision, blocks, digests, to_all(self._listeners))
            return peer, planner, Asker(peer, self._manner)

        self._background = BackgroundLoop()
        try:
            self._peer, self._planner, self._asker = self._background.run(connect())
        except BaseException:
            self._background.close()
            raise
        # Also at interpreter exit, so that the daemon and its sockets never stay behind.
        self.close: Callable[[], object] = weakref.finalize(
            self, _shutdown, self._background, self._planner, self._asker, self._peer
        )

    def listen(self, listener: Listener) -> None:
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
            waiting = Waiting(self._planner)
            while True:
                try:
                    servers = len((await self._planner.route(self.span, None, None, 1)).hops)
                    return servers + (self.local is not None)
                except MissingBlocks as missing:
                    await waiting.more(missing)

        return self._background.run(plan())

    def new_chain(self, max_length: int, adapter: PackedAdapter, listener: Listener | None = None) -> Chain:
        """A session for `max_length` tokens a row over all remote blocks, with what `adapter` adds, not open yet.

        Args:
            listener: hears of this session.
        """
        tell = to_all([*self._listeners, *([listener] if listener is not None else [])])
        carried = Carried(adapter, self._asker.sent)
        return Chain(self._peer, self._planner, self._manner, self.span, max_length, carried, tell)

    def open_chain(self, chain: Chain) -> None:
        """Find a session's servers. Raises `MissingBlocks` or a `RemoteError`.

        When this is interrupted the session may be open or not. So whoever opens one closes it, whatever came of it.
        """
        self._background.run(chain.open())

    def steps(self, chain: Chain, parts: Sequence[tuple[Packed, StepLayout]]) -> list[Packed]:
        """Steps of a session, one behind the other; see `Chain.steps`."""
        return self._background.run(chain.steps(parts))

    def resume_chain(self, chain: Chain) -> None:
        """Replace the servers that a session has lost."""
        self._background.run(chain.resume())

    def close_chain(self, chain: Chain) -> None:
        """Free a session on all its servers."""
        self._background.run(chain.close())

    def split(self, span: Span, token_counts: Sequence[int]) -> tuple[batch_split.Portion, ...]:
        """Which rows of a batch should go which way. Waits for servers of missing blocks; raises `MissingBlocks`."""

        async def split() -> tuple[batch_split.Portion, ...]:
            waiting = Waiting(self._planner)
            while True:
                try:
                    return await self._planner.split(span, token_counts)
                except MissingBlocks as missing:
                    await waiting.more(missing)

        return self._background.run(split())

    def forward(self, span: Span, batches: Sequence[MicroBatch], adapter: PackedAdapter, keeps: bool) -> list[Passage]:
        """Run packed sequences through the blocks of `span`; see `swarm.client.batches.forward_pass`.

        Args:
            keeps: whether a way back may follow.
        """
        work = Pass(self._asker, self._planner, adapter, keeps)
        return self._background.run(forward_all(work, span, batches))

    def backward(
        self, passages: Sequence[Passage], gradients: Sequence[torch.Tensor], adapter: PackedAdapter, first: int
    ) -> list[Gradients]:
        """The gradients of what went in, from those of what came out; see `swarm.client.batches.backward_pass`."""
        work = Pass(self._asker, self._planner, adapter)
        return self._background.run(backward_all(work, passages, gradients, first))


def _shutdown(background: BackgroundLoop, planner: SwarmPlanner, asker: Asker, peer: Peer) -> None:
    async def leave() -> None:
        asker.close()
        await planner.close()
        await peer.shutdown()

    background.run(leave())
    background.close()
