"""A peer that shares weights, or receives them: a process with a libp2p daemon of its own.

python -m benchmarks.weights.peers NAMESPACE ADDRESS    runs a peer that reads commands
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.common.worker import Worker
from benchmarks.weights.links import enter
from swarm.dht.validation import AnnouncementValidator
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import FetchProgress, fetch_parts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import CHUNK_BYTES, FILES, all_parts
from swarm.shared_weights.part_store import PartStore
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer, quiet_hivemind
from swarm.transport.stream import Stream
from tests.homes.laboratory import Host

STREAM_PROTOCOL = "/swarm-benchmark/stream/1"
"""A stream of chunks that are neither read from a drive, nor checked, nor written."""


@dataclass(frozen=True)
class Memory:
    """Resident memory of a peer's process and of its daemon, in bytes."""

    process: int
    daemon: int

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.process - other.process, self.daemon - other.daemon)


@dataclass(frozen=True)
class Fetched:
    """What `PeerProcess.fetch` found.

    Attributes:
        size: bytes of the parts.
        seconds: from the call until all parts were whole.
        kept: bytes that were there before.
        first_s: seconds until the first new chunk was there.
    """

    size: int
    seconds: float
    kept: int
    first_s: float

    @property
    def bytes_per_s(self) -> float:
        return (self.size - self.kept) / self.seconds


class PeerProcess:
    """A peer on a machine, as its parent sees it. End it with `close`.

    Attributes:
        pids: of the process and of its daemon, once it has joined.
    """

    def __init__(self, host: Host) -> None:
        self._worker = Worker(["-m", "benchmarks.weights.peers", host.namespace, host.address])
        self.address = self.peer_id = ""
        self.pids: tuple[int, int] = (0, 0)

    def join(self, peer: str | None = None) -> PeerProcess:
        """Start the daemon: in a new swarm that others can join, or in that of another peer."""
        told = self._ask(do="join", peer=peer)
        self.address, self.peer_id, self.pids = told["address"], told["peer_id"], tuple(told["pids"])
        return self

    def share(self, folder: Path, name: str, rate: float | None = None) -> dict[str, str]:
        """Share the model of a folder; the digests of its parts."""
        found: dict[str, str] = self._ask(do="share", folder=str(folder), name=name, rate=rate)
        return found

    def sent_bytes(self) -> int:
        """Bytes of weights that this peer has sent so far."""
        return int(self._ask(do="sent"))

    def receive_stream(self, holder: str, chunks: int) -> float:
        """Bytes a second of a stream that carries as many chunks, without anything else."""
        return float(self._ask(do="stream", holder=holder, chunks=chunks))

    def fetch(self, order: FetchOrder) -> Fetched:
        """Receive all parts."""
        return Fetched(**self._ask(do="fetch", **order.to_json()))

    def begin(self, order: FetchOrder) -> None:
        """Receive parts until `stop`; returns when the first chunk is there."""
        self._ask(do="begin", **order.to_json())

    def stop(self) -> int:
        """End what `begin` began; bytes that have come."""
        return int(self._ask(do="stop"))

    def die_in_fetch(self, order: FetchOrder, done_bytes: int) -> None:
        """Receive parts, and end as by a power cut when so many bytes are there."""
        self._worker.send({"do": "fetch", "die_at": done_bytes, **order.to_json()})
        with suppress(SystemExit):
            self._worker.receive()

    def memory(self) -> Memory:
        """What it takes now."""
        return Memory(*(_status(pid, "VmRSS") for pid in self.pids))

    def forget_peak(self) -> None:
        """Have `peak` begin now."""
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak(self) -> Memory:
        """The most that it took since `forget_peak`."""
        return Memory(*(_status(pid, "VmHWM") for pid in self.pids))

    def close(self) -> None:
        with suppress(OSError):
            self._worker.close()

    def _ask(self, **command: Any) -> Any:
        self._worker.send(command)
        return self._worker.receive()


@dataclass(frozen=True)
class FetchOrder:
    """What is to be received: all parts of `digests`, from one peer, into a folder.

    Attributes:
        model, revision, blocks: see `PartStore`.
    """

    holder: str
    root: Path
    model: str
    revision: str
    digests: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "root": str(self.root)}

    @property
    def parts(self) -> tuple[str, ...]:
        """The model's parts, in order."""
        return all_parts(sum(part.isdigit() for part in self.digests))


def _status(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class _Peer:
    """What runs in the process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._peer: Peer | None = None
        self._holder: WeightsHolder | None = None
        self._fetching: asyncio.Task[dict[str, Any]] | None = None
        self._progress = FetchProgress(0, 0)
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Answer commands until the parent closes the pipe."""
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            reply = await getattr(self, f"_{command.pop('do')}")(**command)
            print(json.dumps(reply), flush=True)
        if self._peer is not None:
            await self._peer.shutdown()

    async def _join(self, peer: str | None) -> dict[str, Any]:
        listen = () if peer else (f"/ip4/{self._host.address}/tcp/0",)
        config = P2PConfig(initial_peers=(peer,) if peer else (), host_maddrs=listen)
        self._peer = await join_network(config, AnnouncementValidator())
        addresses = [] if peer else await self._peer.visible_addresses()
        pids = (os.getpid(), _daemon().pid)
        return {"address": addresses[0] if addresses else "", "peer_id": self._peer.peer_id, "pids": pids}

    async def _share(self, folder: str, name: str, rate: float | None) -> dict[str, str]:
        assert self._peer is not None
        parts = CheckpointParts(open_checkpoint(folder, name=name))
        self._holder = WeightsHolder(parts, bytes_per_s=rate)
        await self._holder.prepare()
        await self._peer.serve_weights(self._holder.serve)
        await self._peer._streams.serve_protocol(STREAM_PROTOCOL, _send_chunks)
        return parts.known_digests

    async def _sent(self) -> int:
        assert self._holder is not None
        return self._holder.sent_bytes

    async def _stream(self, holder: str, chunks: int) -> float:
        assert self._peer is not None
        stream = await self._peer._streams.open_protocol(holder, STREAM_PROTOCOL)
        began = time.perf_counter()
        await stream.send(messages.GetChunk(FILES, 0, chunks))
        for _ in range(chunks):
            await stream.receive(CHUNK_BYTES)
        seconds = time.perf_counter() - began
        stream.close()
        return chunks * CHUNK_BYTES / seconds

    async def _fetch(self, die_at: int | None = None, **order: Any) -> dict[str, Any]:
        assert self._peer is not None
        self._arrived.clear()
        one = FetchOrder(**{**order, "root": Path(order["root"])})
        first: list[tuple[float, int]] = []
        sizes: list[int] = []
        began = time.perf_counter()

        def note(progress: FetchProgress) -> None:
            if sizes and progress.total_bytes == sizes[-1] and progress.done_bytes > self._progress.done_bytes:
                self._arrived.set()
                if not first:
                    first.append((time.perf_counter() - began, 0))
            sizes.append(progress.total_bytes)
            self._progress = progress
            if die_at is not None and progress.done_bytes >= die_at:
                os.kill(_daemon().pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

        def open_store() -> PartStore:
            return PartStore.open(one.root, one.model, one.revision, len(one.parts) - 2, one.digests)

        async def find() -> list[str]:
            return [one.holder]

        store = await asyncio.to_thread(open_store)
        kept = sum(path.stat().st_blocks * 512 for path in store.folder.iterdir() if path.is_file())
        await fetch_parts(self._peer.open_weights_stream, find, store, one.parts, note)
        seconds = time.perf_counter() - began
        size = sum(manifest.size_bytes for manifest in store.manifests.values())
        return {"size": size, "seconds": seconds, "kept": kept, "first_s": first[0][0] if first else seconds}

    async def _begin(self, **order: Any) -> bool:
        self._fetching = asyncio.create_task(self._fetch(**order))
        arrived = asyncio.create_task(self._arrived.wait())
        await asyncio.wait((self._fetching, arrived), return_when=asyncio.FIRST_COMPLETED)
        arrived.cancel()
        return True

    async def _stop(self) -> int:
        assert self._fetching is not None
        if self._fetching.done():
            await self._fetching  # which raises what went wrong
        self._fetching.cancel()
        await asyncio.gather(self._fetching, return_exceptions=True)
        return self._progress.done_bytes


async def _send_chunks(stream: Stream) -> None:
    asked = messages.decode_weights((await stream.receive(0)).header)
    assert isinstance(asked, messages.GetChunk)
    data = bytes(CHUNK_BYTES)
    for _ in range(asked.chunk):
        await stream.send(messages.PartData(), data)
    await stream.discard_incoming()


def _daemon() -> psutil.Process:
    return max(psutil.Process().children(), key=lambda child: child.memory_info().rss)


if __name__ == "__main__":
    machine = Host(sys.argv[1], sys.argv[2])
    enter(machine)
    quiet_hivemind()
    uvloop.run(_Peer(machine).run())
