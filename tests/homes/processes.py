"""Peers of a swarm on the machines of a laboratory, each in a process of its own."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import uvloop

from swarm.client.routes.events import PeerAvoided
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import SwarmError
from swarm.membership.invite import Invite
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig
from tests.disturbances import greedy
from tests.homes.laboratory import Host, Laboratory
from tests.server_process import prepare
from tests.swarms import FORKS, START_TIMEOUT, STOP_TIMEOUT, ServerProcess, TestSwarm, run_client

T = TypeVar("T")

EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)


@dataclass(frozen=True)
class ServerAt:
    """Makes a server on a machine; for `TestSwarm.start`."""

    host: Host

    def __call__(self, config: ServerConfig) -> Server:
        self.host.enter()
        return Server(config)


class Failed(Exception):
    """What a process could not do, and why."""


@dataclass
class Process:
    """A process on a machine of the laboratory, and a pipe to it."""

    process: Any
    connection: Connection

    def receive(self, timeout_s: float = START_TIMEOUT) -> Any:
        """What it sends next; an error that it sends is raised."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"it has sent nothing for {timeout_s:.0f} s")
        message = self.connection.recv()
        if isinstance(message, BaseException):
            raise message
        return message

    def kill(self) -> None:
        """End it at once, with its libp2p daemon, as a power cut would."""
        for one in (*psutil.Process(self.process.pid).children(), self.process):
            one.kill()
        self.process.join()

    def stop(self) -> None:
        """Let it end in order. Does nothing if it was killed."""
        with suppress(OSError):
            self.connection.send("stop")
        self.process.join(STOP_TIMEOUT)
        if self.process.is_alive():
            self.kill()
        self.connection.close()


@dataclass
class PeerAt(Process):
    """A peer without blocks, such as a bootstrap peer."""

    peer_id: str = ""
    addresses: tuple[str, ...] = ()

    def wait_ready(self) -> PeerAt:
        """Wait until it has joined, and knows how it is reached."""
        self.peer_id, self.addresses = self.receive()
        return self


@dataclass(frozen=True)
class Written:
    """A text that a client has written.

    Attributes:
        tokens: all new ones.
        times: when each came, by the clock of all processes.
        events: what the client told meanwhile (`swarm.client.routes.events`).
    """

    tokens: list[int]
    times: list[float]
    events: list[Any]

    @property
    def avoided(self) -> list[PeerAvoided]:
        """Servers that turned out not to work."""
        return [event for event in self.events if isinstance(event, PeerAvoided)]

    @property
    def longest_pause(self) -> float:
        """The most seconds between two tokens."""
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))

    @property
    def seconds_a_token(self) -> float:
        """The median, without the first tokens."""
        pauses = sorted(after - before for before, after in zip(self.times[2:], self.times[3:], strict=False))
        return pauses[len(pauses) // 2]


@dataclass
class ClientAt(Process):
    """A client. It writes one text at a time."""

    log_file: Path = Path()
    times: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], tokens: int) -> None:
        """Ask it for a text; `wait_for` and `finish` follow."""
        self.times, self.events = [], []
        self.connection.send((list(prompt), tokens))

    def wait_for(self, count: int) -> None:
        """Wait until it has so many tokens of the text."""
        while len(self.times) < count:
            assert self._listen() is None, "the text is shorter"

    def finish(self) -> Written:
        """Wait for the rest of the text."""
        while True:
            tokens = self._listen()
            if tokens is not None:
                return Written(tokens, self.times, self.events)

    @property
    def reconnects(self) -> int:
        """How often it has lost a connection to a server and found it again."""
        return self.log_file.read_text().count("is connected again")

    def _listen(self) -> list[int] | None:
        """The text, if that is what it sends next."""
        kind, value = self.receive()
        if kind == "text":
            return value  # type: ignore[no-any-return]
        (self.times if kind == "token" else self.events).append(value)
        return None

    def write(self, prompt: Sequence[int], tokens: int) -> Written:
        """A whole text. What it raises there is raised here."""
        self.begin(prompt, tokens)
        return self.finish()


@dataclass
class HomesSwarm:
    """A swarm in a laboratory."""

    lab: Laboratory
    swarm: TestSwarm
    stack: ExitStack
    update_period: float = 5.0
    peers: list[PeerAt] = field(default_factory=list)
    clients: list[ClientAt] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return self.swarm.folder

    def bootstrap(self, host: Host, **options: Any) -> PeerAt:
        """Start a bootstrap peer, by which whoever comes from now on joins, and wait for it."""
        peer = self.peer(host, **{"host_maddrs": EVERYWHERE, **options})
        self.swarm.bootstraps = (*self.swarm.bootstraps, peer.addresses[0])
        return peer

    def peer(self, host: Host, **options: Any) -> PeerAt:
        """Start a peer without blocks, and wait for it."""
        config = P2PConfig(initial_peers=self.swarm.bootstraps, membership=self.swarm.membership, **options)
        peer = self.start_process(PeerAt, _run_peer, host, config)
        self.peers.append(peer)
        return peer.wait_ready()

    def server(self, host: Host, blocks: str, log: Path | None = None, **options: Any) -> ServerProcess:
        """Start a server; `wait_ready` on the result waits until it serves."""
        options = {"host_maddrs": EVERYWHERE, "membership": self.swarm.membership, **options}
        p2p = P2PConfig(initial_peers=self.swarm.bootstraps, **options)
        return self.swarm.start(blocks, ServerAt(host), log, p2p=p2p, update_period=self.update_period)

    def client(self, host: Host, **options: Any) -> ClientAt:
        """Start a client, and wait until it has loaded what it holds itself."""
        options = {"wait_for_blocks": 60.0, **options}
        log = self.log(f"client-{len(self.clients)}")
        here = self.swarm
        there = here.model, here.bootstraps, here.membership
        client = self.start_process(ClientAt, _run_client, host, *there, options, log)
        client.log_file = log
        self.clients.append(client)
        assert client.receive() == "ready"
        return client

    def log(self, name: str) -> Path:
        """A file for what a process logs."""
        return Path(self.folder) / f"{name}.log"

    def start_process(self, kind: Any, run: Callable[..., None], *arguments: Any) -> Any:
        """Call `run(connection, folder, *arguments)` in a process of its own, which `kind` is made of."""
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=run, args=(theirs, self.folder, *arguments), daemon=True)
        process.start()
        theirs.close()
        started = kind(process, ours)
        self.stack.callback(started.stop)
        return started


def run_on(host: Host, folder: str, work: Coroutine[Any, Any, T]) -> T:
    """Run all that this process does, on a machine, with the swarm's folder."""
    prepare(folder)
    host.enter()
    return uvloop.run(work)


def relays_said(log: Path) -> list[set[str]]:
    """The relays through which a peer says in its log that it is reached, each time that it says so."""
    said = re.findall(r"This peer is reached through relays \(([^)]*)\)", log.read_text())
    return [set(relays.split(", ")) for relays in said]


@contextmanager
def run_homes(model: Path | str) -> Iterator[HomesSwarm]:
    """A laboratory, and a swarm without any peers so far. Everything ends with the context."""
    folder = tempfile.mkdtemp(prefix="swh-", dir="/tmp")  # short: the daemons' sockets lie in it
    swarm = TestSwarm(model, folder)
    try:
        with Laboratory() as lab, ExitStack() as stack:
            stack.callback(swarm.stop)
            yield HomesSwarm(lab, swarm, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_peer(connection: Connection, folder: str, host: Host, config: P2PConfig) -> None:
    run_on(host, folder, _be_a_peer(connection, config))


async def _be_a_peer(connection: Connection, config: P2PConfig) -> None:
    try:
        peer = await join_network(config, AnnouncementValidator())
    except SwarmError as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        return
    if config.initial_peers:
        await peer.reach.known.wait()
    connection.send((peer.peer_id, await peer.join_addresses()))
    with suppress(EOFError, OSError):
        await asyncio.to_thread(connection.recv)
    await peer.shutdown()


def _run_client(
    connection: Connection,
    folder: str,
    host: Host,
    model: str,
    bootstraps: Sequence[str],
    membership: Invite | None,
    options: dict[str, Any],
    log: Path,
) -> None:
    prepare(folder, log)
    host.enter()
    swarm = TestSwarm(model, folder, membership)
    swarm.bootstraps = tuple(bootstraps)
    with run_client(swarm, **options) as client, suppress(EOFError, OSError):
        client.swarm.add_listener(lambda event: connection.send(("event", event)))
        connection.send("ready")
        while (order := connection.recv()) != "stop":
            prompt, tokens = order
            try:
                streamer = _Streamer(connection)
                written = greedy(client, torch.tensor([prompt]), tokens, streamer=streamer)
                connection.send(("text", written))
            except SwarmError as error:  # some of which cannot be pickled
                connection.send(Failed(f"{type(error).__name__}: {error}"))


class _Streamer:
    """Tells when each token came."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._is_prompt:
            self._connection.send(("token", time.monotonic()))
        self._is_prompt = False

    def end(self) -> None:
        pass
