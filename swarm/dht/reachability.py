"""Whether other peers can reach a peer directly, judged by the addresses that its libp2p daemon announces. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from multiaddr import Multiaddr

RELAY = "p2p-circuit"


def is_relayed(addresses: Iterable[str]) -> bool:
    """Whether a peer has relay addresses and no public ones.

    A peer that has neither is on a private network or on one machine, where other peers dial it directly.
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
    return host is None or ip_address(host).is_global  # otherwise a host name, which was configured
