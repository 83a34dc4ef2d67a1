"""A model by its name in a swarm: who has it, what is believed, and a `PeerModel` of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm.errors import WeightsUnavailable
from swarm.shared_weights.directory import SharersOfModel, find_model
from swarm.shared_weights.peer_model import PeerModel
from swarm.shared_weights.trust import TrustedParts, pinned_path, trusted_at_first_use, trusted_by_file
from swarm.transport.p2p import Peer


async def open_from_peers(
    peer: Peer,
    model: str,
    *,
    revision: str | None = None,
    digests: str | Path | None = None,
    believe_first: bool = False,
    cache_dir: Path | None = None,
) -> PeerModel:
    """A model whose files and weights come from servers of the swarm.

    Args:
        peer: this peer, which has joined the swarm.
        model: its name in the swarm.
        revision: None for the one that servers have.
        digests: file of `swarm digest --for-peers`, which says what the weights must be.
        believe_first: whether to believe what all servers that are met say, if there is no such file.
        cache_dir: where weights are kept; None for this user's cache.

    Raises:
        WeightsUnavailable: no server shares the model, or nothing says what its weights must be.
        UnknownWeights: servers disagree about them.
        DigestFileError: the file cannot be used.
        NotEnoughSpace, ModelNotFound, CheckpointError, UnsupportedModel: what was received cannot be kept or used.
        DhtError: the DHT did not answer.
    """
    trusted = None
    if digests is not None:
        trusted = await asyncio.to_thread(trusted_by_file, model, Path(digests), revision)
    elif not believe_first:
        raise WeightsUnavailable(
            f"nothing says what the weights of {model} must be, so they are taken from no peer: give a file of "
            "`swarm digest MODEL --for-peers --output FILE`, made where all weights are: --digests FILE"
        )
    there = await find_model(peer, model)
    sharers = SharersOfModel(peer, model, there.blocks)

    async def learn() -> TrustedParts:
        if trusted is not None:
            return trusted
        path = pinned_path(model, revision)
        return await trusted_at_first_use(model, revision, peer.open_weights_stream, sharers.find, path)

    return await PeerModel.open(model, learn, peer.open_weights_stream, sharers.find, cache_dir)
