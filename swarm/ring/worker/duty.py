"""Carries out a worker's assignments on this device.

It receives weights from its starter and from other workers, keeps them in its folder, and holds them for others. The
server of these blocks is a child process, so that all memory is given back when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.common.processes import bound_command
from swarm.errors import WeightsNotShared, WorkerFailed, sanitize_text
from swarm.protocol import messages
from swarm.protocol.messages import Assign, DeviceReport, Holding, WorkerEvent
from swarm.ring.worker.device import Device
from swarm.transport.p2p import Peer
from swarm.transport.stream import Stream

if TYPE_CHECKING:  # transformers, which takes 110 MB, is imported when there is something to receive
    from swarm.shared_weights.fetcher import FetchProgress
    from swarm.shared_weights.holder import WeightsHolder

logger = logging.getLogger(__name__)

READING_WEIGHTS = "swarm.shared_weights.checkpoint_parts"
"""What is imported then, in a thread, because that takes seconds."""


class WorkerWeights:
    """What a worker keeps of models. It answers only the peers that its assignment names.

    Args:
        root: folder of all models.
        digests: folder for digests that were computed.
        peer: its place in the network.
    """

    def __init__(self, root: Path, digests: Path, peer: Peer) -> None:
        self._root = root
        self._digests = digests
        self._peer = peer
        self._holders: tuple[str, ...] = ()
        self._holder: WeightsHolder | None = None
        self._preparing: asyncio.Task[None] | None = None

    def know(self, assignment: Assign) -> None:
        """Receive from these holders from now on, and answer them."""
        self._holders = tuple(one.peer_id for one in assignment.holders)
        for one in assignment.holders:
            self._peer.learn_addresses(one.peer_id, one.addresses)

    async def receive(self, assignment: Assign, on_progress: Callable[[int, int], None]) -> Path:
        """Receive what is missing for an assignment; the folder of a model that holds at least its blocks.

        Args:
            on_progress: called with bytes received, and asked for.

        Raises:
            WeightsUnavailable: no holder has them, or the folder cannot be written.
            NotEnoughSpace: they do not fit on the drive.
            ModelNotFound, UnsupportedModel: the files that came are of no model that can be served.
        """
        self.know(assignment)
        await asyncio.to_thread(import_module, READING_WEIGHTS)
        from swarm.shared_weights.fetcher import fetch_parts
        from swarm.shared_weights.manifest import parts_of_blocks
        from swarm.shared_weights.part_store import PartStore

        digests = {part: digest.hex() for part, digest in assignment.digests.items()}
        model = assignment.model, assignment.revision, assignment.blocks
        store = await asyncio.to_thread(PartStore.open, self._root, *model, digests)
        parts = parts_of_blocks(assignment.start, assignment.end)
        held = await asyncio.to_thread(lambda: store.held)  # which looks at the file of each part
        kept = sum(store.manifests[part].size_bytes for part in parts if part in held)

        def note(now: FetchProgress) -> None:
            on_progress(kept + now.done_bytes, assignment.total_bytes)

        await fetch_parts(self._peer.open_weights_stream, self._find_holders, store, parts, note)
        await self._share(store.folder)
        return store.folder

    async def serve(self, stream: Stream) -> None:
        """Answer a peer that asks for weights. Raises `RemoteError`."""
        if self._holder is None or stream.peer_id not in self._holders:
            await stream.send(messages.refusal(WeightsNotShared("this worker holds no weights for you")))
            return
        await self._holder.serve(stream)

    def close(self) -> None:
        """Stop computing digests."""
        if self._preparing is not None:
            self._preparing.cancel()

    async def _find_holders(self) -> Sequence[str]:
        return self._holders

    async def _share(self, folder: Path) -> None:
        """Hold for others what is in the folder, from the moment that its digests are known."""
        from swarm.models.checkpoints.checkpoint import open_checkpoint
        from swarm.shared_weights.checkpoint_parts import CheckpointParts
        from swarm.shared_weights.holder import WeightsHolder

        checkpoint = await asyncio.to_thread(open_checkpoint, folder)
        self._holder = WeightsHolder(CheckpointParts(checkpoint, self._digests))
        self.close()
        self._preparing = asyncio.create_task(self._holder.prepare())


STOP_TIMEOUT_S = 20.0
"""How long the server may take to leave the ring in order."""

KEPT_LINES = 20
_PEER = re.compile(r"^Peer: (\w+),")
_READY = re.compile(r"^Ready: ")
_NOT_READY = re.compile(r"^Not ready, ")
_ERROR = re.compile(r"^Error: (.+)")


class ServerProcess:
    """A running `swarm server`. Start one with `start`, end it with `stop`.

    Attributes:
        pid: its process id.
        peer_id: its peer id, once it has joined the ring; it has another one after each start.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_obstacle: Callable[[str], None]) -> None:
        self.pid = process.pid
        self.peer_id: str | None = None
        self._process = process
        self._on_obstacle = on_obstacle
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._error: str | None = None
        self._ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_obstacle: Callable[[str], None] = lambda line: None,
    ) -> ServerProcess:
        """Start a server.

        Args:
            arguments: of `swarm server`.
            environment: added to this process's own.
            on_obstacle: called with a line that says why a server that runs is not ready.
        """
        process = await asyncio.create_subprocess_exec(
            *bound_command("swarm.server", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "SWARM_LOG_FORMAT": "plain", **environment},
            start_new_session=True,  # Ctrl-C reaches the worker only, which ends its server in order
        )
        return cls(process, on_obstacle)

    async def ready(self) -> str:
        """Wait until clients can use the server; its peer id. Raises `WorkerFailed` if it ends before."""
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({waiting, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self._ready.is_set() or self.peer_id is None:
            raise await self.ended()
        return self.peer_id

    async def ended(self) -> WorkerFailed:
        """Wait until the server has ended; why it did."""
        await asyncio.shield(self._reading)
        code = await self._process.wait()
        if self._error is not None:
            return WorkerFailed(self._error)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        hint = ", perhaps because the device has too little memory" if code == -signal.SIGKILL else ""
        last = f"; its last words: {self._lines[-1]}" if self._lines else ""
        return WorkerFailed(f"the worker's server ended {how}{hint}{last}")

    async def stop(self) -> None:
        """Let it leave the ring and end; it is killed if it does not."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                data = await self._process.stdout.readline()
            except ValueError:  # a line without an end
                continue
            if not data:
                return
            self._note(sanitize_text(data.decode(errors="replace").rstrip("\n")))

    def _note(self, line: str) -> None:
        self._lines.append(line)
        logger.debug("server: %s", line)
        if match := _PEER.search(line):
            self.peer_id = match[1]
        elif match := _ERROR.search(line):
            self._error = match[1]
        elif _READY.search(line):
            self._ready.set()
        elif _NOT_READY.search(line):
            self._on_obstacle(line)


UPDATE_PERIOD_S = 5
"""A ring is small, so its servers can announce themselves often: a starter that was started again sees them soon."""


class WorkerDuty:
    """Carries out a worker's assignments: receives weights, and runs a server.

    A server keeps serving its blocks while the weights of others arrive, and is replaced when they are there.

    Args:
        host_maddrs: addresses on which the server listens.
        environment: added to that of its process; the membership, which no other user may see, is in it.
    """

    def __init__(
        self, device: Device, weights: WorkerWeights, host_maddrs: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        self._device = device
        self._weights = weights
        self._host_maddrs = host_maddrs
        self._environment = environment
        self._server: ServerProcess | None = None

    def report(self, holding: Holding | None) -> DeviceReport:
        """What the device has for an assignment."""
        return self._device.report(holding, self._server.pid if self._server is not None else None)

    def know(self, assignment: Assign) -> None:
        """The holders of weights may have changed."""
        self._weights.know(assignment)

    async def carry_out(self, assignment: Assign, tell: Callable[[WorkerEvent], None]) -> None:
        """Do what is assigned until it is cancelled. Whatever runs stays until `stop`, or until it is replaced.

        Args:
            tell: called with events, whose number does not matter.

        Raises:
            SwarmError: it cannot be done, or has ended.
        """
        number, former = assignment.number, self._server.peer_id if self._server is not None else None
        folder = await self._weights.receive(
            assignment, lambda done, total: tell(WorkerEvent("receiving", number, "", done, total, former))
        )
        tell(WorkerEvent("starting", number))
        await self.stop()
        name, device = self._device.name, self._device.speed.device
        arguments = server_arguments(assignment, folder, name, device, self._host_maddrs)
        self._server = await ServerProcess.start(
            arguments, self._environment, lambda line: tell(WorkerEvent("starting", number, line))
        )
        server_id = await self._server.ready()
        tell(WorkerEvent("online", number, server_id=server_id))
        raise await self._server.ended()

    async def stop(self) -> None:
        """End what runs."""
        if self._server is not None:
            await self._server.stop()
            self._server = None


def server_arguments(
    assignment: Assign, folder: Path, name: str, device: str, host_maddrs: Sequence[str]
) -> Sequence[str]:
    """The arguments of `swarm server` for an assignment. Pure."""
    return [
        *(str(folder), "--blocks", f"{assignment.start}:{assignment.end}"),
        *("--initial-peers", *assignment.initial_peers, "--host-maddrs", *host_maddrs, "--relay", "off"),
        *("--device", device, "--dtype", assignment.dtype, "--quant", assignment.quant, "--flash", "off"),
        *("--share-weights", "off"),  # the worker shares them itself, with its ring only
        *("--cache-tokens", str(assignment.cache_tokens), "--update-period", str(UPDATE_PERIOD_S), "--name", name),
        *(("--threads", str(assignment.threads)) if assignment.threads is not None else ()),
    ]
