"""Where a server's weights come from, and whether other peers get them from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import CheckpointError, DhtError, HubUnreachable, UsageError, WeightsNotShared, WeightsUnavailable
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.protocol import messages
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.config import ServerConfig
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import parts_of_blocks
from swarm.shared_weights.peer_model import PeerModel, open_from_peers
from swarm.transport.p2p import Peer
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)


class WeightSource:
    """A server's model, which is on this machine, on the hub, or at other peers. Made by `open`.

    Attributes:
        checkpoint: what the server loads from.
        from_peers: None if no weights are received from peers.
    """

    def __init__(self, checkpoint: Checkpoint, from_peers: PeerModel | None) -> None:
        self.checkpoint = checkpoint
        self.from_peers = from_peers

    @classmethod
    async def open(
        cls, options: ServerConfig, thread: ComputeThread, join: Callable[[], Awaitable[Peer]]
    ) -> WeightSource:
        """Find the model by `options.weights`.

        Args:
            thread: reads files, which may have to be downloaded first.
            join: joins the network, unless that was done; called if peers are asked.

        Raises:
            ModelNotFound, CheckpointError, UnsupportedModel: the model cannot be served.
            WeightsUnavailable, UnknownWeights, DigestFileError, NotEnoughSpace: it cannot be had from peers.
            DhtError: the DHT, which says who has it, did not answer.
        """
        source = options.weights.source
        if source == "peers":
            model = await _from_peers(options, await join())
            return cls(model.checkpoint, model)
        name = options.model if options.weights.folder is not None else None
        try:
            found = await thread.run(
                lambda: open_checkpoint(
                    options.weights.folder or options.model,
                    revision=options.revision,
                    cache_dir=options.cache_dir,
                    name=name,
                )
            )
            return cls(found, None)
        except HubUnreachable as error:
            if source == "hub" or not options.p2p.initial_peers:
                raise
            logger.info("The model hub cannot be reached; asking peers for the weights")
            try:
                model = await _from_peers(options, await join())
            except (WeightsUnavailable, DhtError) as why:
                raise HubUnreachable(f"{error}. Nor can it be had from peers: {why}") from error
            return cls(model.checkpoint, model)

    async def require(self, span: Span) -> None:
        """Have the weights of these blocks on this machine, if they come from peers. Raises as `fetch_parts`."""
        if self.from_peers is not None:
            await self.from_peers.require(parts_of_blocks(span.start, span.end))


async def _from_peers(options: ServerConfig, peer: Peer) -> PeerModel:
    if options.model is None:
        raise WeightsUnavailable("say which model's weights to get from peers: swarm server MODEL --weights-from peers")
    return await open_from_peers(
        peer,
        options.model,
        revision=options.revision,
        digests=options.weights.digests,
        believe_first=options.p2p.membership is not None,
        cache_dir=options.cache_dir,
    )


class WeightSharing:
    """Gives other peers the weights that this server has, if it was told to; else refuses.

    Args:
        is_busy: whether clients wait for what this server computes.
    """

    def __init__(self, options: ServerConfig, checkpoint: Checkpoint, is_busy: Callable[[], bool]) -> None:
        self._checkpoint = checkpoint
        self._holder: WeightsHolder | None = None
        self._preparing: asyncio.Task[None] | None = None
        if not options.weights.shares(is_private=options.p2p.membership is not None):
            return
        if checkpoint.gguf is not None:
            logger.info("Weights: not shared with other peers, because they are in GGUF")
        else:
            rate = options.weights.share_rate
            self._holder = WeightsHolder(CheckpointParts.of(checkpoint), bytes_per_s=rate, is_busy=is_busy)
            limit = f"up to {format_bytes(rate)}/s" if rate is not None else "as fast as links and clients allow"
            logger.info("Weights: shared with other peers, %s", limit)

    @property
    def is_on(self) -> bool:
        """Whether weights are shared."""
        return self._holder is not None

    def look_again(self) -> None:
        """There may be more to share than before: find out, in the background."""
        if self._holder is None:
            return
        if self._preparing is not None:
            self._preparing.cancel()
        self._holder.parts = CheckpointParts.of(self._checkpoint)
        self._preparing = asyncio.get_running_loop().create_task(self._prepare(self._holder))

    async def serve(self, stream: Stream) -> None:
        """Answer one peer's requests for weights."""
        if self._holder is None:
            await stream.send(messages.refusal(WeightsNotShared("this server does not share its weights")))
            return
        await self._holder.serve(stream)

    async def close(self) -> None:
        """Stop what was begun in the background."""
        if self._preparing is not None:
            self._preparing.cancel()
            with suppress(asyncio.CancelledError):
                await self._preparing

    @staticmethod
    async def _prepare(holder: WeightsHolder) -> None:
        try:
            await holder.prepare()
        except (CheckpointError, UsageError) as error:
            logger.warning("Weights are not shared: %s", error)
