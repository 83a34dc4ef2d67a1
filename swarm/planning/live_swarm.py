"""Looks up the size of a model and its online servers: the part of planning that loads torch and joins a swarm."""

from __future__ import annotations

from swarm.data_structures import WeightDigests
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.weights.quantization import INT4, NF4
from swarm.planning.device_group import ModelSize
from swarm.routing.compatibility import CompatibleServers, compatible_servers
from swarm.transport.p2p import P2PConfig, Peer


def model_size(checkpoint: Checkpoint, dtype: str, quant: str) -> ModelSize:
    """The size of a model. No weights are read.

    Args:
        dtype: data type that the servers compute in; "auto" for the checkpoint's own.
        quant: quantization of the servers' weights; "nf4" is counted as int4, which is larger.
    """
    resolved = resolve_dtype(dtype, checkpoint.config)
    needs = memory_footprint(checkpoint, resolved, INT4 if quant == NF4 else quant)
    hidden_bytes = checkpoint.config.hidden_size * resolved.itemsize
    return ModelSize(checkpoint.name, needs.block_bytes, needs.cache_bytes_per_token, hidden_bytes)


async def fetch_compatible_servers(checkpoint: Checkpoint, config: P2PConfig) -> CompatibleServers:
    """Fetch the servers of a model that are online and hold its weights, as far as these are on this machine.

    Raises as `Peer.create`.
    """
    peer = await Peer.create(config, AnnouncementValidator())
    try:
        local = checkpoint.block_digests(0, checkpoint.blocks)
        digests = WeightDigests(dict(enumerate(local)), f"those in {checkpoint.source}") if local is not None else None
        servers = await fetch_servers(peer.dht, checkpoint.name, checkpoint.blocks)
        return compatible_servers(servers, checkpoint.revision, digests)
    finally:
        await peer.shutdown()
