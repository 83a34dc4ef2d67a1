"""At which relays a peer behind a router asks for a place. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network

PLACES = 3
"""Relays at which a peer behind a router holds a place. One may end, and another be reached badly by some client."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A peer that relays for others.

    Attributes:
        address: where it can be dialed; it does not name the peer.
        is_bootstrap: whether it is an initial peer that serves no blocks, on which everybody depends.
    """

    peer_id: str
    address: str
    is_bootstrap: bool = False

    def circuit(self) -> str:
        """The address, through this relay, of a peer that has a place there."""
        return f"{self.address}/p2p/{self.peer_id}/p2p-circuit"


def order_to_ask(own_id: str, relays: Collection[Relay], held: Collection[Relay]) -> list[Relay]:
    """The relays at which no place is held, in the order in which they should be asked.

    Those in networks where no place is held come first, and bootstrap peers last. Otherwise the order is drawn from the
    ids, so that homes spread over the relays without knowing of each other, and each finds the same ones again.
    """
    drawn = sorted(relays, key=lambda relay: hashlib.sha256(f"{own_id} {relay.peer_id}".encode()).digest())
    taken = {relay.peer_id for relay in held}
    networks = {network_of(relay.address) for relay in held}
    ordered: list[Relay] = []
    for is_bootstrap in (False, True):
        group = [relay for relay in drawn if relay.is_bootstrap == is_bootstrap and relay.peer_id not in taken]
        fresh, others = _by_network(group, networks)
        ordered += [*fresh, *others]
    return ordered


def _by_network(relays: Sequence[Relay], networks: set[str]) -> tuple[list[Relay], list[Relay]]:
    """The first relay of each network that is not among `networks`, and the rest. The networks are added."""
    fresh: list[Relay] = []
    others: list[Relay] = []
    for relay in relays:
        network = network_of(relay.address)
        (others if network in networks else fresh).append(relay)
        networks.add(network)
    return fresh, others


def network_of(address: str) -> str:
    """The /16 (IPv4) or /32 (IPv6) of a multiaddress, or its host name: what probably fails together."""
    _, _, host, *_ = address.split("/")
    try:
        parsed = ip_address(host)
    except ValueError:
        return host
    return str(ip_network((parsed, 32 if isinstance(parsed, IPv6Address) else 16), strict=False))
