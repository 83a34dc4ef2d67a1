"""Servers with real libp2p on a slow network, and a client beside them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.delayed import DelayedPeer, Network
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.client import connection
from swarm.transport import identity
from swarm.transport.p2p import Peer


@contextmanager
def slow_network(path: Path, spans: Sequence[str], network: float | Path, throughput: str = "1000") -> Iterator[Any]:
    """Yield a client of servers of these spans on a slow network.

    Args:
        network: seconds from any machine to any other, or the file of a profile.
    """
    with ExitStack() as ends:
        here, *servers = _machines(network, 1 + len(spans), Path(ends.enter_context(tempfile.TemporaryDirectory())))
        address = ends.enter_context(_servers(path, spans, servers, throughput))
        DelayedPeer.network = Network.read(here[0])
        connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
        ends.callback(setattr, connection, "Peer", Peer)
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
        ends.callback(model.swarm.close)
        yield model


@contextmanager
def slow_servers(path: Path, spans: Sequence[str], delay: float, throughput: str = "1000") -> Iterator[str]:
    """Run a server for each span on a slow network; yields the address to join by."""
    with _servers(path, spans, [(str(delay), ())] * len(spans), throughput) as address:
        yield address


Machine = tuple[str, tuple[str, ...]]
"""What a machine is told of the network (`Network.read`), and more options of its server."""


def _machines(network: float | Path, count: int, folder: Path) -> list[Machine]:
    """Of a client, and of servers."""
    if not isinstance(network, Path):
        return [(str(network), ())] * count
    keys = [folder / f"{number}.key" for number in range(1, count)]
    peers = {identity.load_or_create(key).peer_id: number for number, key in enumerate(keys, 1)}
    found: list[Machine] = []
    for here in range(count):
        known = folder / f"{here}.json"
        known.write_text(json.dumps({"profile": str(network), "here": here, "machines": peers}))
        found.append((str(known), ("--identity-path", str(keys[here - 1])) if here else ()))
    return found


@contextmanager
def _servers(path: Path, spans: Sequence[str], machines: Sequence[Machine], throughput: str) -> Iterator[str]:
    with ExitStack() as ends:
        bootstrap = PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK))
        ends.callback(bootstrap.stop)
        address = bootstrap.address()
        processes = []
        for blocks, (network, more) in zip(spans, machines, strict=True):
            where = ("--initial-peers", address, "--host-maddrs", LOOPBACK)
            options = (str(path), "--blocks", blocks, *where, "--threads", "1", "--throughput", throughput, *more)
            processes.append(PeerProcess(("benchmarks.common.delayed", network, *options)))
            ends.callback(processes[-1].stop)
        for process in processes:
            process.address()
        yield address
