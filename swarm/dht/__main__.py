"""`python -m swarm.dht`, also `swarm dht`: a bootstrap peer. It holds no blocks, stores DHT records, and can relay."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:  # hivemind is imported only after the options are validated
    from swarm.metrics.endpoint import MetricsAddress
    from swarm.metrics.registry import Registry
    from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger("swarm.dht")

REACH_TIMEOUT_S = 15.0
"""How long a peer that joins others waits for their word on whether they can reach it, before it prints its address."""


@click.command(name="dht", cls=console.MultiAddressCommand, context_settings={"show_default": True})
@console.initial_peers_option
@console.membership_option
@console.network_options(default_port=31337)
@click.option(
    "--address-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this peer's address to this file as soon as other peers can join.",
)
@console.metrics_option
@console.log_format_option
@console.errors_to_exit_codes
def main(
    initial_peers: tuple[str, ...],
    membership: str | None,
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    identity_path: Path | None,
    address_file: Path | None,
    relay: bool | int,
    metrics: str | None,
    log_format: str,
) -> None:
    """Run a bootstrap peer, whose address other peers use to join the swarm.

    It also relays for peers behind routers, where no server does. Use --identity-path to keep its address.
    """
    with console.importing_packages():
        import uvloop

        from swarm.membership.invite import read_invite
        from swarm.metrics.endpoint import MetricsAddress
        from swarm.transport.p2p import P2PConfig, quiet_hivemind

    console.configure_logging(log_format)
    quiet_hivemind()
    config = P2PConfig(
        initial_peers=console.split_addresses(initial_peers),
        host_maddrs=console.split_addresses(host_maddrs),
        announce_maddrs=console.split_addresses(announce_maddrs),
        identity_path=identity_path,
        membership=read_invite(membership),
        relay=relay,
    )
    uvloop.run(_serve(config, address_file, MetricsAddress.parse(metrics) if metrics is not None else None))


async def _serve(config: P2PConfig, address_file: Path | None, metrics: MetricsAddress | None) -> None:
    from swarm.dht.validation import AnnouncementValidator
    from swarm.metrics.endpoint import MetricsEndpoint
    from swarm.metrics.registry import EventLoopMetrics, new_registry
    from swarm.transport.joining import join_network

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = new_registry()
    endpoint = MetricsEndpoint(registry, metrics) if metrics is not None else None
    tasks = [asyncio.create_task(EventLoopMetrics(registry).run())] if endpoint is not None else []
    peer = await join_network(config, AnnouncementValidator())
    try:
        _export_metrics(peer, registry)
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_TIMEOUT_S):
                await peer.reach.known.wait()
        addresses = await peer.join_addresses()
        logger.info("Bootstrap peer: %s", peer.peer_id)
        for address in addresses:
            logger.info("Join:   swarm server --initial-peers %s", address)
        logger.info("Set %s=%s to leave the option out", console.INITIAL_PEERS_VARIABLE, addresses[0])
        if address_file is not None:
            _write_address(address_file, addresses[0])
        await stop.wait()
        logger.info("Leaving the swarm")
    finally:
        for task in tasks:
            task.cancel()
        if endpoint is not None:
            endpoint.close()
        await peer.shutdown()


def _write_address(path: Path, address: str) -> None:
    """Write the file atomically: a process that waits for it never sees half of it. Raises `InvalidOption`."""
    unfinished = path.with_name(path.name + ".new")
    try:
        unfinished.write_text(address + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise InvalidOption(f"--address-file {path} cannot be written: {error.strerror}") from None


def _export_metrics(peer: Peer, registry: Registry) -> None:
    from swarm.metrics.dht import BootstrapMetrics

    protocol = peer.dht.protocol
    # Only numbers are read, which is safe from any thread.
    metrics = BootstrapMetrics(
        registry,
        peers=lambda: len(protocol.table),
        records=lambda: len(protocol.store),
        record_bytes=lambda: protocol.store.size_bytes,
    )
    protocol.observe_refusal = lambda refusal: metrics.record_refused(refusal.value)


if __name__ == "__main__":
    main(prog_name="python -m swarm.dht")
