"""Multiaddresses. They are validated before the daemon sees them, because it silently accepts a port that is taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarm.errors import AddressUnavailable, InvalidOption


def parse_peers(addresses: Iterable[str]) -> tuple[str, ...]:
    """The initial peers from the command line. Raises `InvalidOption` unless each address ends in a peer id."""
    peers = tuple(address.strip() for address in addresses if address.strip())
    for peer in peers:
        parsed = _parse(peer)
        if "p2p" not in parsed:
            raise InvalidOption(f"{peer} does not end in /p2p/PEER_ID; copy the complete address that the peer prints")
    return peers


def validate_listen_addresses(addresses: Iterable[str]) -> None:
    """Raise `AddressUnavailable` if an address to listen on is taken or does not belong to this machine."""
    for address in addresses:
        parsed = _parse(address)
        for protocol, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
            if protocol in parsed and "ip4" not in parsed and "ip6" not in parsed:
                raise InvalidOption(f"cannot listen on {address}: it is not an IP address; use one of this machine")
            if protocol in parsed and int(parsed[protocol]) != 0:
                _try_bind(address, parsed, int(parsed[protocol]), kind)


def is_loopback(addresses: Iterable[str]) -> bool:
    """Whether all addresses can be reached from this machine only."""
    return all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in addresses)


def sort_by_reach(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses in order of reach: public ones, then those of this network, then those of this machine."""

    def reach(address: str) -> int:
        parsed = Multiaddr(address)
        host = next((parsed[name] for name in ("ip4", "ip6") if name in parsed), None)
        if host is None:
            return 0  # a host name, which was configured to be announced
        return 0 if ip_address(host).is_global else 2 if ip_address(host).is_loopback else 1

    return tuple(sorted(addresses, key=reach))


def _parse(address: str) -> Multiaddr:
    try:
        return Multiaddr(address)
    except (MultiaddrError, ValueError, LookupError, TypeError) as error:
        raise InvalidOption(
            f"{address!r} is not a valid multiaddress such as /ip4/127.0.0.1/tcp/31337: {error}"
        ) from None


def _try_bind(address: str, parsed: Multiaddr, port: int, kind: socket.SocketKind) -> None:
    family, host = (socket.AF_INET6, parsed["ip6"]) if "ip6" in parsed else (socket.AF_INET, parsed["ip4"])
    with socket.socket(family, kind) as probe:
        # The daemon sets this too: a port in TIME_WAIT after a restart counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            if kind == socket.SOCK_STREAM:
                probe.listen(1)
        except OSError as error:
            why = "another program is listening there" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressUnavailable(
                f"cannot listen on {address}: {why}; choose another port, or 0 for any free one"
            ) from None
