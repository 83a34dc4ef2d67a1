"""The swarm that is attacked: bootstrap peers, servers and a gateway, each a process of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.gateway.settings import GatewaySettings
from swarm.metrics.endpoint import MetricsAddress
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.server.config import WeightsOption
from tests.gateways import run_gateway
from tests.swarms import FORKS, LOOPBACK, STOP_TIMEOUT, TestSwarm, run_swarm
from tests.waiting import wait_until

BLOCKS, HIDDEN_SIZE = 12, 192
SPANS = ("0:4", "4:8", "8:12")
REQUEST_MEMORY_BYTES = 96 << 20
ADAPTER_MEMORY_BYTES = 32 << 20
CACHE_TOKENS = 16384
CACHE_TOKEN_BYTES = 2 * 2 * 32 * 4 * 4
"""Keys and values of 2 heads of 32 float32 numbers in 4 blocks."""

BOOTSTRAP_PEERS = 2


DEFAULT_TOKENS = 64
"""Of an answer whose request does not say how long it may be."""


@dataclass(frozen=True)
class Target:
    """One process that is attacked.

    Attributes:
        name: such as "server 4:8".
        pid: of the process; its libp2p daemon is a child of it.
        metrics_url: its Prometheus endpoint.
        log_file: what it logs, as JSON lines.
    """

    name: str
    pid: int
    metrics_url: str
    log_file: Path


@dataclass(frozen=True)
class ServerTarget(Target):
    """A server.

    Attributes:
        peer_id, addresses: by which others reach it.
        start, end: its blocks.
    """

    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Targets:
    """Everything that is attacked.

    Attributes:
        bootstraps: bootstrap peers, which hold no blocks.
        bootstrap_addresses: by which anybody joins the swarm.
        gateway_url: without a slash at the end.
        model_folder: the model that all serve.
        blocks: of the model.
        swarm: the servers once more, for `tests.swarms.run_client` and others.
        folder: for temporary files.
    """

    servers: tuple[ServerTarget, ...]
    bootstraps: tuple[Target, ...]
    gateway: Target
    bootstrap_addresses: tuple[str, ...]
    gateway_url: str
    model_folder: Path
    blocks: int
    swarm: TestSwarm
    folder: Path

    @property
    def all(self) -> tuple[Target, ...]:
        return (*self.servers, *self.bootstraps, self.gateway)


@contextmanager
def run_targets() -> Iterator[Targets]:
    """The swarm, until the end of the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True)))
        swarm = stack.enter_context(run_swarm(DEMO_FOLDER, ()))
        bootstraps: list[Target] = []
        for number in range(BOOTSTRAP_PEERS):
            peer, address = stack.enter_context(_run_bootstrap(folder, number, swarm.bootstraps))
            bootstraps.append(peer)
            swarm.bootstraps = (*swarm.bootstraps, address)
        servers = _start_servers(swarm, folder)
        log = folder / "gateway.log"
        # A request that has lost its length asks for as many tokens as the gateway gives, which takes long.
        settings = GatewaySettings(default_max_tokens=DEFAULT_TOKENS)
        gateway = stack.enter_context(run_gateway(swarm, settings=settings, log=log))
        yield Targets(
            servers=servers,
            bootstraps=tuple(bootstraps),
            gateway=Target("gateway", gateway.pid, f"{gateway.url}/metrics", log),
            bootstrap_addresses=swarm.bootstraps,
            gateway_url=gateway.url,
            model_folder=DEMO_FOLDER,
            blocks=BLOCKS,
            swarm=swarm,
            folder=folder,
        )


@contextmanager
def _run_bootstrap(folder: Path, number: int, initial_peers: Sequence[str]) -> Iterator[tuple[Target, str]]:
    """A bootstrap peer and its address."""
    log, address = folder / f"bootstrap-{number}.log", folder / f"bootstrap-{number}.address"
    arguments = ["--host-maddrs", LOOPBACK[0], "--metrics", "0", "--log-format", "json", "--address-file", str(address)]
    for peer in initial_peers:
        arguments += ["--initial-peers", peer]
    process = FORKS.Process(target=_serve_bootstrap, args=(arguments, str(folder), log), daemon=True)
    process.start()
    try:
        wait_until(lambda: address.exists() or not process.is_alive())
        found = re.search(r"Metrics: (http://[^\s\"]+)", log.read_text())
        assert found is not None, log.read_text()
        yield Target(f"bootstrap {number}", process.pid, found[1], log), address.read_text().strip()
    finally:
        process.terminate()
        process.join(STOP_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()


def _serve_bootstrap(arguments: list[str], folder: str, log: Path) -> None:
    from swarm.dht.__main__ import main
    from tests.server_process import prepare

    prepare(folder, log)
    main.main(arguments, standalone_mode=False)


def _start_servers(swarm: TestSwarm, folder: Path) -> tuple[ServerTarget, ...]:
    logs = {span: folder / f"server-{span.replace(':', '-')}.log" for span in SPANS}
    for span, log in logs.items():
        swarm.start(
            span,
            log=log,
            metrics=MetricsAddress("127.0.0.1", 0),
            request_memory=REQUEST_MEMORY_BYTES,
            adapter_memory=ADAPTER_MEMORY_BYTES,
            cache_tokens=CACHE_TOKENS,
            weights=WeightsOption(share=True),
        )
    found = []
    for one in swarm.servers:
        one.wait_ready()
        start, end = map(int, one.blocks.split(":"))
        log = logs[one.blocks]
        found.append(
            ServerTarget(f"server {one.blocks}", one.pid, one.metrics_url, log, one.peer_id, one.addresses, start, end)
        )
    return tuple(found)
