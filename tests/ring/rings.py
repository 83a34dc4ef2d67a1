"""Rings in memory: workers whose duty is a script, and their starter. Times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swarm.errors import WorkerFailed
from swarm.planning.device_group import ModelSize
from swarm.protocol.messages import Assign, DeviceReport, Holding, WeightHolder, WorkerEvent
from swarm.ring.pairing import WorkerLine
from swarm.ring.starter.life import RingModel, RingWatcher, StarterLife
from swarm.ring.starter.ring_options import RingOptions
from swarm.ring.starter.ring_plan import RingDevice
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.life import WorkerLife
from swarm.ring.worker.memory import WorkerMemory
from tests.memory_hub import MemoryHub, MemoryNetwork

STARTER = "QmStarter"
BLOCKS = 12
BLOCK_BYTES = 1_000_000
RATES = {"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}
ROOM = 100 * BLOCK_BYTES


@dataclass
class FakeDuty:
    """Receives and starts in virtual seconds.

    Attributes:
        begun: the blocks of all assignments that were begun, also those that failed.
        failures: what the next assignments fail with.
        held: parts of the model that have been received, which are received only once.
    """

    receiving_s: float = 1.0
    starting_s: float = 1.0
    memory: int = ROOM
    begun: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    received: list[int] = field(default_factory=list)
    is_running: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def carry_out(self, assignment: Assign, tell: Callable[[WorkerEvent], None]) -> None:
        self.begun.append(f"{assignment.start}:{assignment.end}")
        for block in range(assignment.start, assignment.end):
            if block not in self.held:
                await asyncio.sleep(self.receiving_s / (assignment.end - assignment.start))
                self.held.add(block)
                self.received.append(block)
                tell(WorkerEvent("receiving", 0, "", len(self.held), assignment.total_bytes))
        tell(WorkerEvent("starting", 0))
        await asyncio.sleep(self.starting_s)
        if self.failures:
            raise WorkerFailed(self.failures.pop(0))
        self.is_running = True
        self.ended.clear()
        tell(WorkerEvent("online", 0, server_id=f"QmServer{len(self.begun)}"))
        await self.ended.wait()
        self.is_running = False
        raise WorkerFailed("the server ended with exit code 1")

    def know(self, assignment: Assign) -> None:
        pass

    async def stop(self) -> None:
        self.is_running = False

    def report(self, holding: Holding | None) -> DeviceReport:
        return DeviceReport("pi", "cpu", self.memory, 10**12, RATES, 0.0, holding)


class MemoryWorker:
    """A worker of the hub, which can be killed and started again with what it remembers."""

    def __init__(self, hub: MemoryHub, name: str, folder: Path, duty: FakeDuty | None = None) -> None:
        self.peer_id = f"QmWorker{name.upper()}"
        self.duty = duty or FakeDuty()
        self.network = MemoryNetwork(hub, self.peer_id)
        self._hub, self._folder = hub, folder / name
        self._folder.mkdir(exist_ok=True)
        self.memory = WorkerMemory.read(self._folder)
        self.memory.write()
        self.line = WorkerLine(self.peer_id, name, ("/ip4/127.0.0.1/tcp/1",), self.memory.secret)
        self.life: WorkerLife | None = None

    async def start(self) -> WorkerLife:
        self.life = WorkerLife(self.peer_id, WorkerMemory.read(self._folder), False, self.duty)
        await self.network.serve(self.life.serve)
        return self.life

    async def kill(self) -> None:
        """As kill -9 does: what it had in memory is gone, and its server with it."""
        self._hub.kill(self.peer_id)
        assert self.life is not None
        await self.life.close()

    @property
    def state(self) -> str:
        assert self.life is not None
        return self.life.status.event.state


class Notices(RingWatcher):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_notice(self, text: str) -> None:
        self.said.append(text)


MODEL = RingModel(
    "model",
    "r1",
    ModelSize("model", (BLOCK_BYTES,) * BLOCKS, 0, 1),
    "float32",
    digests={part: bytes(32) for part in ("files", "client", *map(str, range(BLOCKS)))},
    part_bytes=dict.fromkeys(("files", "client", *map(str, range(BLOCKS))), BLOCK_BYTES),
    options=RingOptions(model=None, workers=(), cache_tokens=1),
)


@asynccontextmanager
async def starter(
    hub: MemoryHub, lines: Sequence[WorkerLine], partition: Sequence[int] | None = None, peer_id: str = STARTER
) -> AsyncIterator[tuple[StarterLife, Notices]]:
    """A starter whose links run until the end of the block, where it dies without a word."""
    network, notices = MemoryNetwork(hub, peer_id), Notices()
    links = [WorkerLink(line, peer_id, "laptop", network.open_stream) for line in lines]
    device = RingDevice("", "here", ROOM, RATES, 0.0)
    own = WeightHolder(peer_id, ())
    life = StarterLife(MODEL, device, links, own, ("/ip4/127.0.0.1/tcp/2/p2p/QmStarter",), partition, notices)
    tasks = [asyncio.create_task(link.run()) for link in links]
    try:
        yield life, notices
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], object], limit: float = 300.0) -> None:
    """Wait in virtual time until something holds."""
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.1)
