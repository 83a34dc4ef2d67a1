"""Multiaddresses. They are validated before the daemon sees them, because it silently accepts a port that is taken."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarm.errors import AddressUnavailable, InvalidOption

_PORT = re.compile(r"[1-9][0-9]{0,4}")
_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]{1,128}")
_BROADCAST = "255.255.255.255"


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
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as the daemon: IPv4 has a socket of its own
        try:
            probe.bind((host, port))
            if kind == socket.SOCK_STREAM:
                probe.listen(1)
        except OSError as error:
            why = "another program is listening there" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressUnavailable(
                f"cannot listen on {address}: {why}; choose another port, or 0 for any free one"
            ) from None


def host_part(address: str) -> str:
    """The IP address, or the name, with which a multiaddress begins."""
    return address.split("/")[2]


def port_part(address: str) -> int:
    """The port of a direct address (`is_direct`)."""
    return int(address.split("/")[4])


def is_direct(address: str) -> bool:
    """Whether this is exactly the multiaddress of a TCP port of one machine, which is not this one for everybody."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp":
        return False
    _, kind, host, _, port = parts
    if not is_ip(host) or f"ip{ip_address(host).version}" != kind or not _PORT.fullmatch(port) or int(port) > 65535:
        return False
    there = ip_address(host)
    mapped = there.ipv4_mapped if isinstance(there, IPv6Address) else None
    return not any(
        one.is_loopback or one.is_unspecified or one.is_multicast or str(one) == _BROADCAST
        for one in (there, mapped or there)
    )


def is_circuit(address: str) -> bool:
    """Whether this is exactly the multiaddress of a peer behind a relay that is dialed directly."""
    direct, is_named, behind = address.partition("/p2p/")
    relay, _, circuit = behind.partition("/")
    return bool(is_named) and is_direct(direct) and circuit == "p2p-circuit" and _is_peer_id(relay)


def is_lan(address: str) -> bool:
    """Whether a multiaddress can be dialed in the same local network only; a link-local one cannot, without a zone."""
    if not is_direct(address):
        return False
    host = ip_address(address.split("/")[2])
    return not host.is_global and not host.is_link_local


def is_ip(host: str) -> bool:
    """Whether this is an IP address that means the same on every machine, so one without a zone."""
    try:
        return bool(ip_address(host)) and "%" not in host
    except ValueError:
        return False


def _is_peer_id(text: str) -> bool:
    if not _BASE58.fullmatch(text):
        return False
    try:
        return "p2p" in Multiaddr(f"/p2p/{text}")
    except (MultiaddrError, ValueError, LookupError, TypeError):
        return False
