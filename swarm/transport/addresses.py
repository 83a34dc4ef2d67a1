"""Multiaddresses: checked before the daemon sees them, because it accepts a taken port without a word."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from multiaddr import Multiaddr

from swarm.errors import AddressUnavailable, InvalidOption


def parse_peers(addresses: Iterable[str]) -> tuple[str, ...]:
    """Initial peers as given by a person. Raises `InvalidOption` unless each is an address that ends in a peer id."""
    peers = tuple(address.strip() for address in addresses if address.strip())
    for peer in peers:
        parsed = _parse(peer)
        if "p2p" not in parsed:
            raise InvalidOption(f"{peer} does not end in /p2p/PEER_ID; copy the whole address that the peer prints")
    return peers


def check_free(addresses: Iterable[str]) -> None:
    """Raise `AddressUnavailable` if an address to listen on is taken or is not one of this machine's."""
    for address in addresses:
        parsed = _parse(address)
        for protocol, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
            if protocol in parsed and "ip4" not in parsed and "ip6" not in parsed:
                raise InvalidOption(f"{address} cannot be listened on; name an IP address of this machine")
            if protocol in parsed and int(parsed[protocol]) != 0:
                _try_bind(address, parsed, int(parsed[protocol]), kind)


def is_loopback(addresses: Iterable[str]) -> bool:
    """True if nobody outside of this machine can reach any of the addresses."""
    return all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in addresses)


def farthest_first(addresses: Iterable[str]) -> tuple[str, ...]:
    """Addresses ordered by who can reach them: everybody, then this network, then this machine alone."""

    def reach(address: str) -> int:
        parsed = Multiaddr(address)
        host = next((parsed[name] for name in ("ip4", "ip6") if name in parsed), None)
        if host is None:
            return 0  # a name, which somebody chose to announce
        return 0 if ip_address(host).is_global else 2 if ip_address(host).is_loopback else 1

    return tuple(sorted(addresses, key=reach))


def _parse(address: str) -> Multiaddr:
    try:
        return Multiaddr(address)
    except Exception as error:  # multiaddr raises many unrelated types
        raise InvalidOption(f"{address!r} is no multiaddress such as /ip4/127.0.0.1/tcp/31337 ({error})") from None


def _try_bind(address: str, parsed: Multiaddr, port: int, kind: socket.SocketKind) -> None:
    family, host = (socket.AF_INET6, parsed["ip6"]) if "ip6" in parsed else (socket.AF_INET, parsed["ip4"])
    with socket.socket(family, kind) as probe:
        # As the daemon does, so that a port in TIME_WAIT after a restart counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            if kind == socket.SOCK_STREAM:
                probe.listen(1)
        except OSError as error:
            why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressUnavailable(
                f"cannot listen on {address}: {why}; choose another port, or 0 for any free one"
            ) from None
