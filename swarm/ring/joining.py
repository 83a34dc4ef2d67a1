"""How a worker and a starter join the network: with an identity and a port that stay the same across restarts."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path

from swarm.common.console import addresses_of_all_interfaces
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AddressUnavailable
from swarm.membership.invite import Invite
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity"


async def start_peer(
    folder: Path,
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    port: int | None,
    membership: Invite | None,
) -> Peer:
    """Start a peer that joins no other one, and that others join or dial.

    Args:
        folder: holds its identity.
        host_maddrs: addresses to listen on; empty for all interfaces.
        port: where it listened last, if no addresses are given.
        membership: an invite to a private swarm.

    Raises as `Peer.create`.
    """
    config = P2PConfig(
        host_maddrs=host_maddrs or addresses_of_all_interfaces(port or _free_port()),
        announce_maddrs=announce_maddrs,
        identity_path=folder / IDENTITY_FILE,
        membership=membership,
        relay=False,
    )
    rules = AnnouncementValidator()
    try:
        return await Peer.create(config, rules)
    except AddressUnavailable as error:
        if host_maddrs or not port:
            raise
        logger.warning("Port %d, where this machine listened before, cannot be used: %s", port, error)
        return await Peer.create(replace(config, host_maddrs=addresses_of_all_interfaces(_free_port())), rules)


def _free_port() -> int:
    """A port that is free now: the same one for IPv4 and IPv6, so that it can be asked for again."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
