"""Where a client's part of a model comes from: this machine, the hub, or servers that share it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from swarm.client.config import NetworkOptions
from swarm.client.local_blocks import LocalBlocksOption, parse_local_blocks
from swarm.client.threads.network_thread import NetworkThread
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import HubUnreachable, InvalidOption, SwarmError
from swarm.membership.invite import Invite
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.shared_weights.manifest import CLIENT, parts_of_blocks
from swarm.shared_weights.peer_model import open_from_peers
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

SOURCES = ("auto", "hub", "peers")


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` was told of the model and where to find it; see there."""

    model: str | Path | None
    revision: str | None
    cache_dir: str | Path | None
    weights_from: str
    initial_peers: tuple[str, ...]
    membership: Invite | None
    network: NetworkOptions

    def __post_init__(self) -> None:
        if self.weights_from not in SOURCES:
            raise InvalidOption(f"weights_from={self.weights_from!r} is not one of {', '.join(SOURCES)}")

    def open(self, local_blocks: LocalBlocksOption = None) -> Checkpoint:
        """The model, of which the client's part and these blocks are on this machine if they come from peers."""
        if self.weights_from == "peers":
            return self._from_peers(local_blocks)
        try:
            return open_checkpoint(self.model, revision=self.revision, cache_dir=self.cache_dir)
        except HubUnreachable as error:
            if self.weights_from == "hub" or not self._believes:
                raise
            logger.info("The model hub cannot be reached; asking peers for the weights")
            try:
                return self._from_peers(local_blocks)
            except SwarmError as why:
                raise HubUnreachable(f"{error}. Nor can it be had from peers: {why}") from error

    @property
    def _believes(self) -> bool:
        return self.network.digests is not None or self.membership is not None

    def _from_peers(self, local_blocks: LocalBlocksOption) -> Checkpoint:
        if self.model is None:
            raise InvalidOption('weights_from="peers" needs the name that the model has in the swarm')
        thread = NetworkThread()
        try:
            return thread.run(self._receive(str(self.model), local_blocks))
        finally:
            thread.close()

    async def _receive(self, model: str, local_blocks: LocalBlocksOption) -> Checkpoint:
        joining = P2PConfig(initial_peers=self.initial_peers, membership=self.membership)
        peer = await Peer.create(joining, AnnouncementValidator())
        try:
            found = await open_from_peers(
                peer,
                model,
                revision=self.revision,
                digests=self.network.digests,
                believe_first=self.membership is not None,
                cache_dir=Path(self.cache_dir) if self.cache_dir is not None else None,
            )
            span = parse_local_blocks(local_blocks, found.checkpoint.blocks)
            await found.require([*parts_of_blocks(0, span.end if span is not None else 0), CLIENT])
            return found.received
        finally:
            await peer.shutdown()
