"""A swarm under churn: servers are killed and started continuously while clients generate texts with known results.

Some servers, and the bootstrap peer by which all join, are spared: it shows in them what a long life of others' deaths
leaves behind. Each server, each client, and each libp2p daemon is a process of its own. All of them are ended by
process id at the end, whatever happens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from benchmarks.common.peer_memory import PeerMemory
from benchmarks.serving.churn_client import CLIENT_TIMEOUT_S, Ban, GeneratedText, KnownText, run_clients
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.server.placement.initial_blocks import weakest_window
from tests.swarms import ServerProcess, TestSwarm, is_running, run_swarm

BLOCKS = 12
SPANS = ("0:4", "4:8", "8:12") * 2
SPARED = ("2:6", "7:10")
"""Held by servers that are never killed."""

SPAN_LENGTHS = (3, 4, 5, 6)
"""Numbers of blocks that a new server may hold, so that spans overlap in many ways."""

MAX_STARTING = 3
"""Maximum number of servers that are starting. With more, the next kill waits: on a busy machine a start takes longer
than the time between two kills, and a swarm without servers cannot be joined."""

POLL_PERIOD_S = 0.2
"""How often an overdue kill is tried again."""

MEMORY_PERIOD_S = 10.0


@dataclass
class ChurnResult:
    """What happened during a run. Times are as in `GeneratedText`."""

    began: float
    written: list[GeneratedText] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    """Peer id of a server -> when it was killed."""
    gaps: int = 0
    """Number of kills after which no server held some blocks."""
    memory: dict[str, PeerMemory] = field(default_factory=dict)
    """Of those that live as long as the churn: clients, spared servers, and the bootstrap peer."""
    ended: float = 0.0
    survivors: list[int] = field(default_factory=list)
    """Ids of processes that are still running at the end."""

    @property
    def wrong_bans(self) -> list[Ban]:
        """Bans of servers that were alive, and honest as all of them are."""
        bans = (ban for written in self.written for ban in written.bans)
        return [ban for ban in bans if ban.when < self.killed.get(ban.peer_id, math.inf)]


def run_churn(
    seconds: float, clients: int, every: float, seed: int, texts: Sequence[KnownText], min_kills: int = 0
) -> ChurnResult:
    """Let clients generate for `seconds`, while a random server is replaced every `every` seconds.

    The run continues beyond `seconds` until `min_kills` servers were killed and every client has generated a text.
    """
    bootstrap = PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK))
    try:
        with (
            _run_servers(bootstrap.address()) as swarm,
            run_clients(swarm, clients, texts, seed) as connections,
        ):
            churn = ChurnResult(time.monotonic())
            driver = _ChurnDriver(swarm, bootstrap.pid, connections, churn, random.Random(seed))
            driver.run(seconds, every, min_kills)
            churn.ended = time.monotonic()
            driver.finish()
            pids = driver.pids()
    finally:
        bootstrap.stop()
    churn.survivors = [pid for pid in pids if is_running(pid)]
    return churn


@contextmanager
def _run_servers(bootstrap: str) -> Iterator[TestSwarm]:
    """The servers of the beginning, those that are spared first."""
    with run_swarm(DEMO_FOLDER, ()) as swarm:
        swarm.bootstraps = (bootstrap,)
        for server in [swarm.start(blocks, dtype="float32") for blocks in (*SPARED, *SPANS)]:
            server.wait_ready()
        yield swarm


class _ChurnDriver:
    """Kills and starts servers, receives the clients' results, and samples memory."""

    def __init__(
        self,
        swarm: TestSwarm,
        bootstrap_pid: int,
        clients: dict[Connection, Any],
        churn: ChurnResult,
        chance: random.Random,
    ) -> None:
        self._swarm = swarm
        self._clients = clients
        self._churn = churn
        self._chance = chance
        self._starting: list[ServerProcess] = []
        self._pids: set[int] = set()
        self._spared = swarm.servers[: len(SPARED)]
        self._long_lived = {
            **{f"client {number}": process.pid for number, process in enumerate(clients.values())},
            **{f"server {server.blocks}": server.pid for server in self._spared},
            "bootstrap peer": bootstrap_pid,
        }

    def run(self, seconds: float, every: float, min_kills: int) -> None:
        now = time.monotonic()
        end, next_kill, next_look = now + seconds, now + every, now
        while now < end or not self._has_seen_enough(min_kills):
            if now >= next_kill and len(self._starting) < MAX_STARTING:
                self._kill_one()
                next_kill = max(next_kill + every, now)
            if now >= next_look:
                self._sample_memory()
                next_look += MEMORY_PERIOD_S
            events = [next_look, max(next_kill, now + POLL_PERIOD_S), *([end] if now < end else [])]
            self._listen(min(events) - time.monotonic())
            now = time.monotonic()
        self._sample_memory()

    def _has_seen_enough(self, min_kills: int) -> bool:
        wrote = {written.client for written in self._churn.written}
        return len(self._churn.kills) >= min_kills and len(wrote) >= len(self._clients)

    def finish(self) -> None:
        """Let every client finish its text. Raises `TimeoutError` if one does not."""
        for connection in self._clients:
            connection.send("stop")
        deadline = time.monotonic() + CLIENT_TIMEOUT_S
        while self._clients:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._clients)} clients did not end in {CLIENT_TIMEOUT_S:.0f} s")
            self._listen(1.0)
        for server in self._starting:
            server.wait_ready()

    def pids(self) -> set[int]:
        """Ids of all processes that were seen at any time, and of the servers."""
        return self._pids | {server.pid for server in self._swarm.servers}

    def _kill_one(self) -> None:
        victim = self._chance.choice([server for server in self._swarm.working() if server not in self._spared])
        self._churn.killed[victim.peer_id] = time.monotonic()
        victim.kill()
        self._churn.kills.append(time.monotonic())
        self._churn.gaps += min(self._holders(self._swarm.working())) == 0
        # The new server goes where it is needed most, taking starting servers into account.
        span = weakest_window(
            self._holders([*self._swarm.working(), *self._starting]), self._chance.choice(SPAN_LENGTHS)
        )
        self._starting.append(self._swarm.start(str(span), dtype="float32"))

    def _holders(self, servers: Sequence[ServerProcess]) -> list[float]:
        """How many of these servers hold each block."""
        spans = [Span(*map(int, server.blocks.split(":"))) for server in servers]
        return [float(sum(block in span for span in spans)) for block in range(BLOCKS)]

    def _listen(self, seconds: float) -> None:
        """Receive messages of clients and new servers for `seconds` seconds, at most one each."""
        starting = {server.connection: server for server in self._starting}
        for ready in wait([*self._clients, *starting], max(0.0, seconds)):
            if ready in starting:
                self._starting.remove(starting[ready].wait_ready())
                continue
            try:
                message = ready.recv()
            except EOFError:
                message = GeneratedText(-1, error="a client's process has ended")
            if isinstance(message, GeneratedText):
                self._churn.written.append(message)
            if message is None or message.client < 0:
                del self._clients[ready]

    def _sample_memory(self) -> None:
        for name, pid in self._long_lived.items():
            self._churn.memory.setdefault(name, PeerMemory()).take_sample(pid)
        for pid in (*self._long_lived.values(), *(server.pid for server in self._swarm.working())):
            with suppress(psutil.NoSuchProcess):
                self._pids |= {pid, *(child.pid for child in psutil.Process(pid).children())}
