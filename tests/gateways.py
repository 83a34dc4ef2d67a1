"""Gateways for tests: real processes, forked like the servers of `tests.swarms`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from swarm.gateway.settings import GatewaySettings
from tests.swarms import FORKS, START_TIMEOUT, STOP_TIMEOUT, TestSwarm


def metric_at(url: str, name: str) -> float:
    """The sum of a metric's values over all labels, as Prometheus would read it from `url`."""
    lines = httpx.get(url, timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@dataclass
class GatewayProcess:
    """One running gateway.

    Attributes:
        url: without a slash at the end.
    """

    process: Any
    url: str

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def api(self) -> str:
        """The `base_url` for OpenAI's clients."""
        return f"{self.url}/v1"

    def metric(self, name: str) -> float:
        """The sum of a metric's values over all labels."""
        return metric_at(f"{self.url}/metrics", name)

    def stop(self) -> None:
        """Stop it as SIGTERM does. Does nothing if it has ended."""
        if not self.process.is_alive():
            return
        os.kill(self.pid, signal.SIGTERM)
        self.process.join(STOP_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError("the gateway did not leave by itself")


@contextmanager
def run_gateway(
    swarm: TestSwarm,
    models: Sequence[str | Path] = (),
    *,
    settings: GatewaySettings | None = None,
    keys: Path | None = None,
    with_monitor: bool = False,
    exits: Sequence[Path] = (),
    drafts: Sequence[str] = ("copies",),
    log: Path | None = None,
    **options: Any,
) -> Iterator[GatewayProcess]:
    """A gateway of the swarm's model, or of `models`, until the end of the context.

    Args:
        log: a file for what it prints and logs, see `prepare`.
        options: of `from_pretrained`.
    """
    options = {"initial_peers": swarm.addresses, "wire": "none", **options}
    sources = [str(model) for model in models] or [swarm.model]
    ours, theirs = FORKS.Pipe()
    arguments = (
        sources,
        options,
        settings or GatewaySettings(),
        keys,
        with_monitor,
        exits,
        drafts,
        theirs,
        swarm.folder,
        log,
    )
    process = FORKS.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(START_TIMEOUT):
        process.kill()
        raise TimeoutError("the gateway did not start")
    try:
        message = ours.recv()
    except EOFError:
        process.join()
        raise AssertionError("the gateway ended before it was ready") from None
    if isinstance(message, BaseException):
        raise message
    gateway = GatewayProcess(process, str(message).rstrip("/"))
    try:
        yield gateway
    finally:
        gateway.stop()


def _serve(
    sources: list[str],
    options: dict[str, Any],
    settings: GatewaySettings,
    keys: Path | None,
    with_monitor: bool,
    exits: Sequence[Path],
    drafts: Sequence[str],
    connection: Connection,
    folder: str,
    log: Path | None,
) -> None:
    from swarm.gateway.lifecycle import ListenAddress, serve_gateway
    from tests.server_process import prepare

    prepare(folder, log)
    try:
        address = ListenAddress("127.0.0.1", 0)
        serve_gateway(sources, options, settings, keys, address, with_monitor, exits, drafts, connection.send)
    except Exception as error:
        connection.send(error)
        raise


__all__ = ["GatewayProcess", "metric_at", "run_gateway"]
