"""`swarm.Ring`: a ring that this process starts, uses and ends."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop

from swarm.client.config import NetworkOptions
from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.threads.network_thread import NetworkThread
from swarm.common.dtypes import dtype_name
from swarm.common.files.atomic_file import replace_file
from swarm.errors import CheckpointError, PairingRefused, SwarmError, WeightsNotShared
from swarm.membership.invite import read_invite
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.planning.live_swarm import model_size
from swarm.protocol import messages
from swarm.protocol.messages import WeightHolder
from swarm.protocol.messages.peers import Port
from swarm.ring.joining import LockedFolder, default_folder, port_of, start_peer, told_addresses, with_peer_id
from swarm.ring.pairing import WorkerLine, parse_lines
from swarm.ring.starter.life import RingModel, RingWatcher, StarterLife
from swarm.ring.starter.ring_options import Dtype, Quant, RingOptions, partition_numbers
from swarm.ring.starter.ring_plan import RingDevice, RingPlan
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.device import Device, device_name, find_speed
from swarm.server.limits import DEFAULT_CACHE_TOKENS
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import CLIENT, ModelManifest, all_parts
from swarm.transport.p2p import Peer
from swarm.transport.stream import Stream

WAIT_FOR_BLOCKS_S = 3600.0
"""How long a session waits for a worker that is gone, where the others cannot hold its blocks."""

FOLDER = "ring"
_PORT_FILE = "port.json"


class Ring:
    """A ring of this machine, the starter, and of workers: a context manager.

        with swarm.Ring("org/model", workers=[LINE, LINE], partition="2+5+5") as ring:
            ring.model.generate(**inputs, lanes="auto")

    The workers receive their weights from this machine, and are released when the ring ends.

    Args:
        model: local folder or hub id, of which this machine has all files; None for the demo model.
        workers: the lines that `swarm worker` printed.
        partition: the starter's blocks, and those of each worker, such as "2+5+5"; None for the fastest plan.
        membership: for workers of a private swarm; as in `from_pretrained`.
        revision, dtype, quant, cache_tokens, threads, cache_dir, folder, host_maddrs, announce_maddrs, show_route: see
            `RingOptions`.
        watcher: hears what happens.
        model_options: further options of `from_pretrained`, such as `wire`.

    Raises:
        WorkerLineError, PartitionError, InvalidOption: what is given cannot be a ring.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        workers: Sequence[str] = (),
        partition: str | Sequence[int] | None = None,
        *,
        membership: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        dtype: Dtype = "auto",
        quant: Quant = "none",
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        threads: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        host_maddrs: Sequence[str] = (),
        announce_maddrs: Sequence[str] = (),
        show_route: bool = False,
        watcher: RingWatcher | None = None,
        **model_options: Any,
    ) -> None:
        options = RingOptions(
            model=os.fspath(model) if model is not None else None,
            workers=parse_lines(workers),
            partition=partition_numbers(partition),
            revision=revision,
            dtype=dtype,
            quant=quant,
            cache_tokens=cache_tokens,
            threads=threads,
            cache_dir=Path(cache_dir) if cache_dir is not None else None,
            membership=read_invite(os.environ.get("SWARM_MEMBERSHIP") if membership is None else membership),
            folder=Path(folder) if folder is not None else None,
            host_maddrs=tuple(host_maddrs),
            announce_maddrs=tuple(announce_maddrs),
            show_route=show_route,
        )
        self._initialize(options, watcher, model_options)

    @classmethod
    def of(
        cls, options: RingOptions, watcher: RingWatcher | None = None, model_options: Mapping[str, Any] | None = None
    ) -> Ring:
        """A ring by its options."""
        ring = cls.__new__(cls)
        ring._initialize(options, watcher, model_options or {})
        return ring

    def _initialize(self, options: RingOptions, watcher: RingWatcher | None, model_options: Mapping[str, Any]) -> None:
        self.options = options
        self._watcher = watcher or RingWatcher()
        self._model_options = dict(model_options)
        self._running: _RunningRing | None = None
        self._model: Any = None

    def start(self) -> Ring:
        """Collect the workers, decide which blocks each holds, send what it lacks, and wait until all serve.

        Raises:
            ModelNotFound, CheckpointError: the model cannot be used, or is not wholly on this machine.
            PairingRefused: a worker does not take this machine as its starter; the subclass says why.
            WorkerUnreachable: a worker does not answer.
            PartitionError, NotEnoughMemory: the devices cannot hold the blocks like this.
            WorkerFailed: a worker could not do what it was given, with its own reason.
            FolderInUse: another ring of this machine runs with the same folder.
        """
        options = self.options
        checkpoint = open_checkpoint(options.model, revision=options.revision, cache_dir=options.cache_dir)
        parts, model = _read_model(checkpoint, options, self._watcher)
        self._running = _RunningRing(options, parts, model, self._watcher)
        weakref.finalize(self, self._running.close)
        try:
            self._running.start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self, unpair: bool = False) -> None:
        """End the ring, and release its workers. With `unpair` another starter may have them from now on."""
        if self._model is not None:
            self._model.swarm.close()
            self._model = None
        if self._running is not None:
            self._running.close(unpair)
            self._running = None

    def __enter__(self) -> Ring:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def plan(self) -> RingPlan:
        """Who holds what now."""
        plan = self._life.plan
        assert plan is not None, "a ring that runs has a plan"
        return plan

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """Addresses by which other clients may join the ring."""
        return self._started.initial_peers

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of `from_pretrained` by which this machine uses the ring."""
        options, started = self.options, self._started
        return {
            "initial_peers": started.initial_peers[:1],
            "membership": options.membership.to_line() if options.membership is not None else "",
            "revision": options.revision,
            "dtype": options.dtype,
            "cache_dir": options.cache_dir,
            "local_blocks": self.plan.local_blocks or None,
            "show_route": options.show_route,
            "network": NetworkOptions(allowed_servers=self._life.servers, wait_for_blocks=WAIT_FOR_BLOCKS_S, audit=0.0),
            **self._model_options,
        }

    @property
    def model(self) -> Any:
        """The distributed model; see `AutoDistributedModelForCausalLM.from_pretrained`."""
        if self._model is None:
            self._model = AutoDistributedModelForCausalLM.from_pretrained(self.options.model, **self.client_options)
        return self._model

    @property
    def _started(self) -> _RunningRing:
        if self._running is None or self._running.life is None:
            raise SwarmError("the ring does not run: use it inside `with swarm.Ring(...) as ring:`")
        return self._running

    @property
    def _life(self) -> StarterLife:
        life = self._started.life
        assert life is not None
        return life


def _read_model(
    checkpoint: Checkpoint, options: RingOptions, watcher: RingWatcher
) -> tuple[CheckpointParts, RingModel]:
    """The model with the digests of all its parts, which are computed the first time. Missing files are downloaded."""
    for file in sorted(set(checkpoint.weight_map.values())):
        if checkpoint.cached(file) is None:
            checkpoint.fetch(file)
    parts = CheckpointParts.of(checkpoint)
    missing = sorted(set(all_parts(checkpoint.blocks)) - set(parts.held))
    if missing:
        raise CheckpointError(
            f"{checkpoint.source} lacks weights (of part {missing[0]} and {len(missing) - 1} others): the starter of a "
            "ring needs the whole model on its drive"
        )
    total, done = parts.size_bytes(parts.held), 0

    def on_hashed(size: int) -> None:
        nonlocal done
        done += size
        watcher.on_hashed(done, total)

    return parts, describe_model(checkpoint, parts.manifests(on_hashed=on_hashed), options)


def describe_model(checkpoint: Checkpoint, manifest: ModelManifest, options: RingOptions) -> RingModel:
    """What the workers have to know of a model. Raises `UnsupportedModel` if it cannot be cut."""
    return RingModel(
        name=checkpoint.name,
        revision=checkpoint.revision,
        size=model_size(checkpoint, options.dtype, options.quant),
        dtype_name=dtype_name(resolve_dtype(options.dtype, checkpoint.config)),
        digests={part: bytes.fromhex(digest) for part, digest in manifest.digests.items()},
        part_bytes={part: one.size_bytes for part, one in manifest.parts.items()},
        options=options,
    )


class _RunningRing:
    """A ring's place in the network: its bootstrap peer, the holder of its weights, and the life of the ring."""

    def __init__(self, options: RingOptions, parts: CheckpointParts, model: RingModel, watcher: RingWatcher) -> None:
        self.initial_peers: tuple[str, ...] = ()
        self.life: StarterLife | None = None
        self._options, self._parts, self._model, self._watcher = options, parts, model, watcher
        self._workers = frozenset(line.peer_id for line in options.workers)
        self._holder = WeightsHolder(parts)
        self._folder = LockedFolder(options.folder or default_folder(FOLDER), "ring")
        self._thread: NetworkThread | None = NetworkThread()
        self._stack = AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._thread is not None
        self._thread.run(self._start())

    async def _start(self) -> None:
        """Join the network, hold the weights, and have the workers serve. Raises also as `Peer.create`."""
        options, model, folder = self._options, self._model, self._folder.path
        speed = await find_speed(folder, "cpu", torch.get_num_threads())
        port = await asyncio.to_thread(_read_port, folder)
        peer = await start_peer(folder, options.host_maddrs, options.announce_maddrs, port, options.membership)
        self._stack.push_async_callback(peer.shutdown)
        visible = await peer.visible_addresses()
        await asyncio.to_thread(_write_port, folder, port_of(visible))
        addresses = told_addresses(visible, options.announce_maddrs)
        self.initial_peers = with_peer_id(addresses, peer.peer_id)
        await peer.serve_weights(self._serve_weights)
        name = device_name(options.name)
        memory = max(0, Device(name, speed, folder).report().memory - model.part_bytes.get(CLIENT, 0))
        rates = {str(one): rate for one, rate in speed.read_rates.items()}
        device = RingDevice("", name, memory, rates, speed.block_seconds)
        links = _links(options, peer)
        own = WeightHolder(peer.peer_id, addresses)
        life = StarterLife(model, device, links, own, self.initial_peers, options.partition, self._watcher)
        self.life = life
        for link in links:
            self._stack.push_async_callback(_cancel, asyncio.create_task(link.run()))
        await life.collect()
        life.make_plan()
        await life.deploy()
        self._watching = asyncio.create_task(life.watch())

    async def _serve_weights(self, stream: Stream) -> None:
        if stream.peer_id not in self._workers:
            await stream.send(messages.refusal(WeightsNotShared("this ring shares weights with its workers only")))
            return
        await self._holder.serve(stream)

    def close(self, unpair: bool = False) -> None:
        """Release the workers, if they were given anything to do, and leave the network."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            thread.run(self._stop(unpair))
        finally:
            thread.close()
            self._folder.close()

    async def _stop(self, unpair: bool) -> None:
        if self._watching is not None:
            await _cancel(self._watching)
        if self.life is not None and (self.life.has_assigned or unpair):
            for link in await self.life.release(unpair):
                self._watcher.on_notice(
                    f"Worker {link.line} was not reached; it ends its part by itself within a few minutes"
                )
        await self._stack.aclose()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _read_port(folder: Path) -> int | None:
    """Where this starter listened last: its workers' servers find it there again."""
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _PORT_FILE).read_bytes(), type=Port)
    return None


def _write_port(folder: Path, port: int | None) -> None:
    with suppress(OSError):
        replace_file(folder / _PORT_FILE, msgspec.json.encode(port))


REACH_TIMEOUT_S = 15.0


def unpair(options: RingOptions) -> dict[WorkerLine, bool]:
    """End the pairing with the workers of a ring that does not run. Whether each was reached.

    Raises:
        PairingRefused: a worker has another starter; the subclass says so.
        FolderInUse: the ring runs.
    """
    folder = LockedFolder(options.folder or default_folder(FOLDER), "ring")
    try:
        return uvloop.run(_unpair(options, folder))
    finally:
        folder.close()


async def _unpair(options: RingOptions, folder: LockedFolder) -> dict[WorkerLine, bool]:
    peer = await start_peer(folder.path, options.host_maddrs, options.announce_maddrs, None, options.membership)
    try:
        released = await asyncio.gather(*map(_unpair_one, _links(options, peer)))
        return dict(zip(options.workers, released, strict=True))
    finally:
        await peer.shutdown()


def _links(options: RingOptions, peer: Peer) -> list[WorkerLink]:
    """Conversations with the workers of a ring, which have not begun."""
    for line in options.workers:
        peer.learn_addresses(line.peer_id, line.addresses)
    name = device_name(options.name)
    return [WorkerLink(line, peer.peer_id, name, peer.open_worker_stream) for line in options.workers]


async def _unpair_one(link: WorkerLink) -> bool:
    there = asyncio.Event()
    link.on_change = lambda changed: there.set()
    talking = asyncio.create_task(link.run())
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_TIMEOUT_S):
                while not link.is_connected:
                    await there.wait()
                    there.clear()
                    if isinstance(link.error, PairingRefused):
                        raise link.error
        return await link.release(unpair=True)
    finally:
        await _cancel(talking)
