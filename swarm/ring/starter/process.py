"""A starter's place in the network: the ring's bootstrap peer, the holder of its weights, and the life of the ring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from swarm.common.dtypes import dtype_name
from swarm.common.files.atomic_file import replace_file
from swarm.errors import WeightsNotShared
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.planning.live_swarm import model_size
from swarm.protocol import messages
from swarm.protocol.messages import WeightHolder
from swarm.protocol.messages.peers import Port
from swarm.ring.joining import port_of, start_peer, told_addresses, with_peer_id
from swarm.ring.starter.life import RingModel, RingWatcher, StarterLife
from swarm.ring.starter.ring_options import RingOptions
from swarm.ring.starter.ring_plan import RingDevice
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.device import Device, device_name, find_speed
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import CLIENT, ModelManifest
from swarm.transport.stream import Stream

_PORT_FILE = "port.json"


@dataclass(frozen=True)
class RunningStarter:
    """A starter that talks to its workers.

    Attributes:
        life: of the ring.
        initial_peers: where the ring is joined.
    """

    life: StarterLife
    initial_peers: tuple[str, ...]


def describe_model(checkpoint: Checkpoint, manifest: ModelManifest, options: RingOptions) -> RingModel:
    """What the workers have to know of a model. Raises `UnsupportedModel` if it cannot be cut."""
    return RingModel(
        name=checkpoint.name,
        revision=checkpoint.revision,
        size=model_size(checkpoint, options.dtype, options.quant),
        dtype_name=dtype_name(resolve_dtype(options.dtype, checkpoint.config)),
        digests={part: bytes.fromhex(digest) for part, digest in manifest.digests.items()},
        part_bytes={part: one.size_bytes for part, one in manifest.parts.items()},
        dtype=options.dtype,
        quant=options.quant,
        cache_tokens=options.cache_tokens,
        threads=options.threads,
    )


@asynccontextmanager
async def running_starter(
    options: RingOptions,
    folder: Path,
    parts: CheckpointParts,
    model: RingModel,
    watcher: RingWatcher,
) -> AsyncIterator[RunningStarter]:
    """Join the network, hold the weights, and keep up conversations with the workers. Nothing is assigned yet.

    Args:
        folder: the starter's, which has to be this process's own (`LockedFolder`).
        parts: of the model.
        watcher: hears what happens to the ring.

    Raises as `Peer.create`.
    """
    name = device_name(options.name)
    async with AsyncExitStack() as stack:
        speed = await find_speed(folder, "cpu", torch.get_num_threads())
        port = await asyncio.to_thread(_read_port, folder)
        peer = await start_peer(folder, options.host_maddrs, options.announce_maddrs, port, options.membership)
        stack.push_async_callback(peer.shutdown)
        visible = await peer.visible_addresses()
        await asyncio.to_thread(_write_port, folder, port_of(visible))
        addresses = told_addresses(visible, options.announce_maddrs)
        initial_peers = with_peer_id(addresses, peer.peer_id)

        workers = frozenset(line.peer_id for line in options.workers)
        holder = WeightsHolder(parts)

        async def serve_weights(stream: Stream) -> None:
            if stream.peer_id not in workers:
                await stream.send(messages.refusal(WeightsNotShared("this ring shares weights with its workers only")))
                return
            await holder.serve(stream)

        await peer.serve_weights(serve_weights)
        report = Device(name, speed, folder).report()
        memory = max(0, report.memory - model.part_bytes.get(CLIENT, 0))
        device = RingDevice(
            "", name, memory, {str(one): rate for one, rate in speed.read_rates.items()}, speed.block_seconds
        )
        for line in options.workers:
            peer.learn_addresses(line.peer_id, line.addresses)
        links = [WorkerLink(line, peer.peer_id, name, peer.open_worker_stream) for line in options.workers]
        own = WeightHolder(peer.peer_id, addresses)
        life = StarterLife(model, device, links, own, initial_peers, options.partition, watcher)
        talking = [asyncio.create_task(link.run()) for link in links]
        stack.push_async_callback(_cancel, talking)
        yield RunningStarter(life, initial_peers)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _read_port(folder: Path) -> int | None:
    """Where this starter listened last: its workers' servers find it there again."""
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _PORT_FILE).read_bytes(), type=Port)
    return None


def _write_port(folder: Path, port: int | None) -> None:
    with suppress(OSError):
        replace_file(folder / _PORT_FILE, msgspec.json.encode(port))
