"""The addresses that a worker, or a starter, tells the other side. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from swarm.protocol.messages.peers import MAX_ADDRESSES
from swarm.transport.addresses import is_loopback, sort_by_reach

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
