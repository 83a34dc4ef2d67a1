"""Sizes of real models, and the servers that hold them now: the part of planning that loads torch and joins a swarm."""

from __future__ import annotations

from pathlib import Path

from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.checkpoints.partial_model import resolve_dtype
from swarm.models.weights.quantization import INT4, NF4, NONE
from swarm.planning.device_group import ModelSize
from swarm.routing.compatibility import CompatibleServers, compatible_servers
from swarm.transport.p2p import P2PConfig, Peer


def open_model(
    model: str | None, revision: str | None, dtype: str, cache_dir: Path | None, quant: str = NONE
) -> tuple[Checkpoint, ModelSize]:
    """A model's checkpoint and size; no weights are read. Raises `UsageError` of the fitting kind.

    Args:
        model: local folder or hub id; None for the demo model.
        dtype: what the servers compute in; "auto" for the checkpoint's own.
        quant: form of the servers' weights; for "nf4" what CPUs hold in its place, which is a little more.
    """
    checkpoint = open_checkpoint(model, revision=revision, cache_dir=cache_dir)
    resolved = resolve_dtype(dtype, checkpoint.config)
    needs = memory_footprint(checkpoint, resolved, INT4 if quant == NF4 else quant)
    hidden_bytes = checkpoint.config.hidden_size * resolved.itemsize
    return checkpoint, ModelSize(checkpoint.name, needs.weights, needs.cache_per_token, hidden_bytes)


async def servers_of(checkpoint: Checkpoint, initial_peers: tuple[str, ...]) -> CompatibleServers:
    """The servers of a model that are online now and hold the same weights. Raises `PeerUnreachable`."""
    peer = await Peer.create(P2PConfig(initial_peers=initial_peers), AnnouncementValidator())
    try:
        return compatible_servers(
            await fetch_servers(peer.dht, checkpoint.name, checkpoint.blocks), checkpoint.revision
        )
    finally:
        await peer.shutdown()
