"""`python -m swarm.dht`, also `swarm dht`: a bootstrap peer. It holds no blocks; it knows who does, and can relay."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import click

from swarm import console

logger = logging.getLogger("swarm.dht")


@click.command(name="dht", cls=console.ManyAddresses, context_settings={"show_default": True})
@console.initial_peers_option
@console.network_options(default_port=31337)
@console.exit_codes
def main(
    initial_peers: tuple[str, ...],
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    identity_path: Path | None,
) -> None:
    """Run a bootstrap peer: the address that everybody else joins by.

    It also carries traffic for peers behind firewalls. Give it --identity-path to keep its address.
    """
    import uvloop

    from swarm.transport.p2p import P2PConfig, quiet_hivemind

    console.plain_log_lines()
    quiet_hivemind()
    config = P2PConfig(
        initial_peers=console.split(initial_peers),
        host_maddrs=console.split(host_maddrs),
        announce_maddrs=console.split(announce_maddrs),
        identity_path=identity_path,
    )
    uvloop.run(_serve(config))


async def _serve(config: P2PConfig) -> None:  # type: ignore[name-defined]  # noqa: F821
    from swarm.dht.validation import AnnouncementValidator
    from swarm.transport.p2p import Peer

    leave = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    peer = await Peer.create(config, AnnouncementValidator())
    try:
        addresses = await peer.visible_addresses()
        logger.info("Bootstrap peer: %s", peer.peer_id)
        for address in addresses:
            logger.info("Join:   swarm server --initial-peers %s", address)
        logger.info("Set %s=%s to leave the option out", console.INITIAL_PEERS_VARIABLE, addresses[0])
        await leave.wait()
        logger.info("Leaving the swarm")
    finally:
        await peer.shutdown()


if __name__ == "__main__":
    main(prog_name="python -m swarm.dht")
