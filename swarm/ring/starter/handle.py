"""`swarm.Ring`: a ring that this process starts, uses and ends."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop

from swarm.client.config import NetworkOptions
from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.threads.network_thread import NetworkThread
from swarm.errors import CheckpointError, PairingRefused, SwarmError
from swarm.membership.invite import read_invite
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.ring.joining import start_peer
from swarm.ring.locked_folder import LockedFolder, default_folder
from swarm.ring.pairing import WorkerLine, parse_lines
from swarm.ring.starter.life import RingModel, RingWatcher
from swarm.ring.starter.process import RunningStarter, describe_model, running_starter
from swarm.ring.starter.ring_options import Dtype, Quant, RingOptions, options_of, partition_numbers, read_ring_file
from swarm.ring.starter.ring_plan import RingPlan
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.device import device_name
from swarm.server.limits import DEFAULT_CACHE_TOKENS
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.manifest import all_parts

WAIT_FOR_BLOCKS_S = 3600.0
"""How long a session waits for a worker that is gone, where the others cannot hold its blocks."""

FOLDER = "ring"


class StartWatcher(RingWatcher):
    """Hears what happens to a ring, also before its workers are asked."""

    def on_hashed(self, done_bytes: int, total_bytes: int) -> None:
        """So much of the weights has been read, to compute digests. Called in the thread that starts the ring."""


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
        watcher: StartWatcher | None = None,
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
        cls, options: RingOptions, watcher: StartWatcher | None = None, model_options: Mapping[str, Any] | None = None
    ) -> Ring:
        """A ring by its options."""
        ring = cls.__new__(cls)
        ring._initialize(options, watcher, model_options or {})
        return ring

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **model_options: Any) -> Ring:
        """The ring that `swarm ring --save` has written. Raises `RingFileError`."""
        return cls.of(options_of(read_ring_file(Path(path))), None, model_options)

    def _initialize(self, options: RingOptions, watcher: StartWatcher | None, model_options: Mapping[str, Any]) -> None:
        self.options = options
        self._watcher = watcher or StartWatcher()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def plan(self) -> RingPlan:
        """Who holds what now."""
        plan = self._started.life.plan
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
            "network": NetworkOptions(allowed_servers=started.life.servers, wait_for_blocks=WAIT_FOR_BLOCKS_S),
            **self._model_options,
        }

    @property
    def model(self) -> Any:
        """The distributed model; see `AutoDistributedModelForCausalLM.from_pretrained`."""
        if self._model is None:
            self._model = AutoDistributedModelForCausalLM.from_pretrained(self.options.model, **self.client_options)
        return self._model

    @property
    def _started(self) -> RunningStarter:
        if self._running is None or self._running.starter is None:
            raise SwarmError("the ring does not run: use it inside `with swarm.Ring(...) as ring:`")
        return self._running.starter


def _read_model(
    checkpoint: Checkpoint, options: RingOptions, watcher: StartWatcher
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


class _RunningRing:
    """What runs for a ring, and has to be ended."""

    def __init__(self, options: RingOptions, parts: CheckpointParts, model: RingModel, watcher: RingWatcher) -> None:
        self.starter: RunningStarter | None = None
        self._options, self._parts, self._model, self._watcher = options, parts, model, watcher
        self._folder = LockedFolder(options.folder or default_folder(FOLDER), "ring")
        self._thread: NetworkThread | None = NetworkThread()
        self._stack = AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._thread is not None
        self._thread.run(self._start())

    async def _start(self) -> None:
        work = running_starter(self._options, self._folder.path, self._parts, self._model, self._watcher)
        self.starter = await self._stack.enter_async_context(work)
        life = self.starter.life
        await life.collect()
        life.make_plan()
        await life.deploy()
        self._watching = asyncio.create_task(life.watch())

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
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.starter is not None and (self.starter.life.has_assigned or unpair):
            for link in await self.starter.life.release(unpair):
                self._watcher.on_notice(
                    f"Worker {link.line} was not reached; it ends its part by itself within a few minutes"
                )
        await self._stack.aclose()


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
        for line in options.workers:
            peer.learn_addresses(line.peer_id, line.addresses)
        links = [
            WorkerLink(line, peer.peer_id, device_name(options.name), peer.open_worker_stream)
            for line in options.workers
        ]
        return dict(zip(options.workers, await asyncio.gather(*map(_unpair_one, links)), strict=True))
    finally:
        await peer.shutdown()


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
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
