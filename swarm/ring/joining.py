"""How a worker and a starter join the network: with a folder of their own, an identity and a port that stay the same
across restarts, and the addresses that they tell each other."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from swarm.common.console import addresses_of_all_interfaces
from swarm.common.files.folders import data_folder
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AddressUnavailable, FolderInUse, InvalidOption
from swarm.membership.invite import Invite
from swarm.protocol.messages.peers import MAX_ADDRESSES
from swarm.transport.addresses import is_loopback, sort_by_reach
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

MAX_ADDRESS_CHARACTERS = 128
_PORT = re.compile(r"/(tcp|udp)/[0-9]+")


def told_addresses(visible: Iterable[str], announced: Iterable[str] = ()) -> tuple[str, ...]:
    """Where others should dial this peer, without its id: those given by hand first.

    Those of loopback are left out if there are others.

    Args:
        visible: addresses of this peer, as its daemon knows them.
        announced: given by hand.
    """
    own = sort_by_reach(address.partition("/p2p/")[0] for address in visible)
    found = dict.fromkeys((*(address.partition("/p2p/")[0] for address in announced), *own))
    usable = [address for address in found if len(address) <= MAX_ADDRESS_CHARACTERS and "/p2p-circuit" not in address]
    outside = [address for address in usable if not is_loopback([address])]
    return tuple((outside or usable)[:MAX_ADDRESSES])


def with_peer_id(addresses: Iterable[str], peer_id: str) -> tuple[str, ...]:
    """The same addresses with the id of the peer that listens there."""
    return tuple(f"{address}/p2p/{peer_id}" for address in addresses)


def any_port(addresses: Iterable[str]) -> tuple[str, ...]:
    """The same addresses to listen on, with any free port."""
    return tuple(_PORT.sub(r"/\1/0", address) for address in addresses)


def port_of(addresses: Iterable[str]) -> int | None:
    """The TCP port of the first address that has one."""
    ports = (re.search(r"/tcp/([0-9]+)", address) for address in addresses)
    return next((int(port[1]) for port in ports if port is not None), None)


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


_LOCK = "lock"


def default_folder(name: str) -> Path:
    """The default folder for the files of a worker or a starter.

    Raises `InvalidOption` if the user has no home directory.
    """
    folder = data_folder()
    if folder is None:
        raise InvalidOption("this user has no home folder; say with --folder where this machine's part is kept")
    return folder / name


class LockedFolder:
    """A folder, made if it is missing, that is this process's own until `close`.

    Args:
        whose: such as "worker", for messages.

    Raises:
        FolderInUse: another process has it.
        InvalidOption: it cannot be used.
    """

    def __init__(self, path: Path, whose: str) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidOption(f"--folder {path} cannot be used: {error.strerror}; name another one") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise FolderInUse(
                f"another {whose} of this machine runs in {path}: end it, or give this one a folder of its own with "
                "--folder"
            ) from None

    def close(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)
