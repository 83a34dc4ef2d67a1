"""Swarms of real server processes for tests.

Servers are forked from one process that has torch, transformers and hivemind imported already, so that a server takes
a second to start instead of six. They are separate processes all the same, with their own libp2p daemon.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from swarm.client.config import NetworkOptions
from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.session import InferenceSession
from swarm.client.tuning.options import TuningOptions
from swarm.membership.invite import Invite
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import encode_digest_file, write_digest_file
from swarm.server.config import BlocksOption, ServerConfig
from swarm.transport.p2p import P2PConfig
from tests.server_caches import CachedSession

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
# Limits for what hangs: on a busy machine a start takes many times as long as on a quiet one.
START_TIMEOUT = 300.0
STOP_TIMEOUT = 30.0

KNOWN = 5
"""Servers whose addresses a newcomer gets, so that some of them may die while it starts."""

FORKS = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")  # CUDA survives no fork
FORKS.set_forkserver_preload(["tests.server_process"])


@dataclass
class ServerProcess:
    """One running server."""

    process: Any
    connection: Connection
    blocks: str
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    metrics_url: str = ""
    frozen: tuple[int, ...] = ()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def works(self) -> bool:
        """True from the moment that it serves until it is killed, stopped or frozen."""
        return bool(self.addresses) and not self.frozen and self.process.is_alive()

    def wait_ready(self) -> ServerProcess:
        """Wait until it serves; its error is raised here."""
        if not self.connection.poll(START_TIMEOUT):
            raise TimeoutError("the server did not start")
        message = self.connection.recv()
        if isinstance(message, BaseException):
            raise message
        self.peer_id, self.addresses, self.metrics_url = message
        return self

    def caches(self) -> list[CachedSession]:
        """What it holds of each of its sessions."""
        self.connection.send("caches")
        found: list[CachedSession] = self.connection.recv()
        return found

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.join()
        self.thaw()  # its daemon can only end if it runs
        self.connection.close()

    def freeze(self, daemon: bool = False) -> None:
        """Let it hang until `thaw`; with its libp2p daemon if wanted, as if the whole machine did."""
        children = [child.pid for child in psutil.Process(self.pid).children()] if daemon else []
        self.frozen = (self.pid, *children)
        for pid in self.frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, if it still exists."""
        for pid in self.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.frozen = ()

    def stop(self) -> None:
        """Let it leave in order. Does nothing if it was killed."""
        self.thaw()
        with suppress(OSError):
            self.connection.send("stop")
        self.process.join(STOP_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError("a server did not leave by itself")
        self.connection.close()


class TestSwarm:
    """Servers of one model. Whoever comes joins by the first of them that work.

    Attributes:
        bootstraps: addresses of peers without blocks, by which whoever comes joins as well.
    """

    __test__ = False

    def __init__(self, model: Path | str, folder: str, membership: Invite | None = None) -> None:
        self.model = str(model)
        self.membership = membership
        self.servers: list[ServerProcess] = []
        self.bootstraps: tuple[str, ...] = ()
        self.folder = folder

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of some peers that work."""
        return (*self.bootstraps, *(server.addresses[0] for server in self.working()))[:KNOWN]

    @property
    def address(self) -> str:
        return self.addresses[0]

    def working(self) -> list[ServerProcess]:
        """The servers that serve now, the oldest first."""
        return [server for server in self.servers if server.works]

    def holders(self, blocks: str) -> list[ServerProcess]:
        """The servers that serve now and were started with `--blocks` like this."""
        return [server for server in self.working() if server.blocks == blocks]

    def server(self, peer_id: str) -> ServerProcess:
        """The process of a peer."""
        return next(server for server in self.servers if server.peer_id == peer_id)

    def caches(self, session: InferenceSession) -> list[CachedSession]:
        """What each server of a session's route holds of it, in the order of the route."""
        assert session.route is not None
        found = []
        for hop in session.route.hops:
            held = [one for one in self.server(hop.server.peer_id).caches() if one.span == str(hop.span)]
            found.append(held[-1])
        return found

    def start(
        self,
        blocks: str,
        make: Callable[[ServerConfig], Any] | None = None,
        log: Path | None = None,
        **options: Any,
    ) -> ServerProcess:
        """Start a server; `wait_ready` on the result waits until it serves.

        Args:
            make: makes the `Server` from its `ServerConfig`, in the server's process; for servers that misbehave.
            log: a file for what it prints and logs, see `prepare`.
        """
        from tests.server_process import serve

        peers = self.addresses
        config = ServerConfig(
            model=self.model,
            blocks=BlocksOption.parse(blocks),
            p2p=P2PConfig(initial_peers=peers, host_maddrs=LOOPBACK, membership=self.membership),
            throughput=1000.0,
            stay=True,
            update_period=10.0,
            threads=1,
        )
        ours, theirs = FORKS.Pipe()
        arguments = (replace(config, **options), theirs, self.folder, make, log)
        process = FORKS.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        server = ServerProcess(process, ours, blocks)
        self.servers.append(server)
        return server

    def client(self, **options: Any) -> Any:
        """A new client's model; unless said otherwise, what travels is exact, so that texts can be compared, and no
        audits disturb what a test counts."""
        options = {"wire": "none", "audit": 0.0, **options}
        if self.membership is not None:
            options.setdefault("membership", self.membership.to_line())
        return AutoDistributedModelForCausalLM.from_pretrained(
            self.model, initial_peers=self.addresses, **group_options(options)
        )

    def stop(self) -> None:
        for server in self.servers:
            with suppress(OSError):
                server.connection.send("stop")
        for server in self.servers:
            server.stop()


@contextmanager
def run_swarm(
    model: Path | str, blocks: Sequence[str], membership: Invite | None = None, **options: Any
) -> Iterator[TestSwarm]:
    """A swarm with one server for each entry of `blocks`; a private one if there is an invite, which all peers use."""
    folder = tempfile.mkdtemp(prefix="swt-", dir="/tmp")  # short: the daemon's sockets lie in it
    swarm = TestSwarm(model, folder, membership)
    try:
        for first in blocks[:1]:
            swarm.start(first, **options).wait_ready()
        rest = [swarm.start(wanted, **options) for wanted in blocks[1:]]
        for server in rest:
            server.wait_ready()
        yield swarm
    finally:
        try:
            swarm.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def group_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained`: the fields of `NetworkOptions` and `TuningOptions` are put into these groups."""
    grouped = dict(options)
    for name, kind in (("network", NetworkOptions), ("tuning", TuningOptions)):
        members = {field.name: grouped.pop(field.name) for field in fields(kind) if field.name in grouped}
        if members:
            grouped[name] = kind(**members)
    return grouped


@contextmanager
def run_client(swarm: TestSwarm, **options: Any) -> Iterator[Any]:
    """A client that disconnects at the end."""
    model = swarm.client(**options)
    try:
        yield model
    finally:
        model.swarm.close()


def is_running(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (OSError, IndexError):
        return False


__all__ = ["FORKS", "ServerProcess", "TestSwarm", "is_running", "run_client", "run_swarm"]


def write_digests(folder: Path, path: Path) -> Path:
    """Write the digests of a checkpoint's blocks to a file."""
    checkpoint = open_checkpoint(folder)
    digests = checkpoint.block_digests(0, checkpoint.blocks)
    assert digests is not None
    write_digest_file(path, encode_digest_file(checkpoint.name, checkpoint.revision, digests))
    return path
