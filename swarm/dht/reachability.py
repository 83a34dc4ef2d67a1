"""Whether others reach a peer directly, from the addresses that its libp2p daemon tells everybody. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from multiaddr import Multiaddr

RELAY = "p2p-circuit"


def is_relayed(addresses: Iterable[str]) -> bool:
    """True if the peer has addresses by way of relays, and none that everybody can dial.

    A peer without either is on a private network or on one machine, where those who see it dial it directly.
    """
    relayed = False
    for address in addresses:
        parsed = Multiaddr(address)
        if RELAY in parsed:
            relayed = True
        elif _is_public(parsed):
            return False
    return relayed


def _is_public(address: Multiaddr) -> bool:
    host = next((address[name] for name in ("ip4", "ip6") if name in address), None)
    return host is None or ip_address(host).is_global  # without a number it is a name that somebody chose to announce
