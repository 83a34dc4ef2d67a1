"""Joining a swarm whose initial peers may be slow to answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from multiaddr import Multiaddr

from swarm.errors import ClockDiffers, PeerUnreachable
from swarm.transport.dht.records import RecordRules
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0
"""How long a server keeps trying to join while one of its initial peers is there but does not answer."""

RETRY_PERIOD_S = 2.0
"""Pause between two attempts."""

CONNECT_TIMEOUT_S = 5.0
"""How long an initial peer's machine may take to accept a plain TCP connection."""


async def join_network(config: P2PConfig, rules: RecordRules, timeout_s: float | None = None) -> Peer:
    """`Peer.create`, repeated for `timeout_s` (`JOIN_TIMEOUT_S` if None) while the initial peers are alive but slow.

    If nothing accepts connections at any of the addresses, the first attempt is the last one: a wrong address fails at
    once.

    Raises:
        PeerUnreachable: no initial peer answered in time, or this machine's clock is wrong.
        AddressUnavailable, IdentityError, InvalidOption, PeerLost: as `Peer.create`.
    """
    timeout_s = JOIN_TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await Peer.create(config, rules)
        except PeerUnreachable as error:
            if isinstance(error.__cause__, ClockDiffers):  # they did answer: this machine's clock is wrong
                raise
            if not await _any_accepts_connections(config.initial_peers):
                raise
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerUnreachable(f"{error} (tried for {timeout_s:.0f} s)") from error
            logger.warning("No initial peer has answered yet; trying again for up to %.0f s: %s", left_s, error)
        await asyncio.sleep(min(RETRY_PERIOD_S, max(0.0, deadline - time.monotonic())))


async def _any_accepts_connections(addresses: Iterable[str]) -> bool:
    return any(await asyncio.gather(*map(_accepts_connections, addresses)))


async def _accepts_connections(address: str) -> bool:
    """Whether something listens at this address; True where that cannot be tested (UDP)."""
    parsed = Multiaddr(address)
    host = next((parsed[name] for name in ("ip4", "ip6", "dns", "dns4", "dns6") if name in parsed), None)
    if host is None or "tcp" not in parsed:
        return True
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, int(parsed["tcp"]))
    except OSError:  # among them TimeoutError, and names that cannot be resolved
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
