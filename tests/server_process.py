"""What a forked test server runs. Imported by the fork server, so that every fork has the heavy packages loaded."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import uvloop
from multiaddr import Multiaddr

import swarm.models.execution.span_model
from swarm.common import console
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from swarm.transport.p2p import quiet_hivemind
from tests.server_caches import read_caches

assert swarm.models.execution.span_model  # imported for its weight
torch.set_num_threads(1)
# Imports what else a server needs to read an address.
Multiaddr("/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")


def prepare(folder: str, log: Path | None = None) -> None:
    """What every process of a test does first.

    Args:
        folder: for temporary files, because a process that is killed removes none.
        log: a file for all that it prints, and for what it logs, as JSON.
    """
    if log is not None:
        _print_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test runner
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    quiet_hivemind()


def _print_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    console.configure_logging("json")


def serve(
    config: ServerConfig,
    connection: Connection,
    folder: str,
    make: Callable[[ServerConfig], Server] | None = None,
    log: Path | None = None,
) -> None:
    """Run a server, made by `make` if given, until the test says "stop", or is gone. "caches": see `read_caches`."""
    prepare(folder, log)
    uvloop.run(_serve((make or Server)(config), connection))


async def _serve(server: Server, connection: Connection) -> None:
    try:
        await server.start()
    except Exception as error:
        connection.send(error)
        return
    connection.send((server.peer.peer_id, await server.peer.visible_addresses(), server.metrics_url))
    try:
        while await asyncio.to_thread(connection.recv) == "caches":
            connection.send(await read_caches(server))
    except (EOFError, OSError):
        pass
    finally:
        await server.stop()
