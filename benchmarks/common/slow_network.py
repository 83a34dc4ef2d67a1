"""Servers with real libp2p on a slow network, and a client beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.delayed import DelayedPeer
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.client import connection
from swarm.transport.p2p import Peer


@contextmanager
def slow_network(path: Path, spans: Sequence[str], delay: float) -> Iterator[Any]:
    """Yield a client of servers of these spans on a slow network."""
    DelayedPeer.seconds = delay
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    try:
        with slow_servers(path, spans, delay) as address:
            model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
            yield model
            model.swarm.close()
    finally:
        connection.Peer = Peer  # type: ignore[attr-defined, misc]


@contextmanager
def slow_servers(path: Path, spans: Sequence[str], delay: float, throughput: str = "1000") -> Iterator[str]:
    """Run a server for each span on a slow network; yields the address to join by."""
    with ExitStack() as ends:
        bootstrap = PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK))
        ends.callback(bootstrap.stop)
        address = bootstrap.address()
        processes = []
        for blocks in spans:
            where = ("--initial-peers", address, "--host-maddrs", LOOPBACK)
            options = (str(path), "--blocks", blocks, *where, "--threads", "1", "--throughput", throughput)
            processes.append(PeerProcess(("benchmarks.common.delayed", str(delay), *options)))
            ends.callback(processes[-1].stop)
        for process in processes:
            process.address()
        yield address
