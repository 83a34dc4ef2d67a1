"""Greetings: members open a stream to each other and close it again. The handshake passes on the newest revocations.

A peer that learns a new list greets all its neighbors at once. So a revocation spreads quickly, whichever peer hears of
it first. Each peer also greets a few others every `GREETING_PERIOD_S` seconds, in case it missed one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from swarm.common.warn_once import WarnOnce
from swarm.errors import MembershipError, MembershipExpired, MembershipRevoked, NotAMember, RemoteError
from swarm.transport.members.gate import MemberGate

logger = logging.getLogger(__name__)

GREETING_PERIOD_S = 10.0
GREETED_EACH_PERIOD = 4
GREETED_WITH_NEWS = 64
GREETINGS_AT_A_TIME = 8

Greet = Callable[[str], Awaitable[None]]
"""Opens a stream to a peer and closes it. Raises `RemoteError`."""


async def greet_all(peer_ids: Iterable[str], greet: Greet) -> dict[str, RemoteError | None]:
    """Greet peers, a few at a time. Returns what went wrong with each, or None."""
    results: dict[str, RemoteError | None] = {}
    waiting = iter(dict.fromkeys(peer_ids))

    async def greet_waiting() -> None:
        for peer in waiting:
            try:
                await greet(peer)
                results[peer] = None
            except RemoteError as error:
                results[peer] = error

    await asyncio.gather(*(greet_waiting() for _ in range(GREETINGS_AT_A_TIME)))
    return results


def require_welcome(results: dict[str, RemoteError | None]) -> None:
    """Raise `MembershipError` if no initial peer accepted this one as a member, and at least one refused it.

    If none answered at all, joining the DHT fails with an error that says so.
    """
    refusals = [error for error in results.values() if isinstance(error, NotAMember)]
    if refusals and None not in results.values():
        raise MembershipError(str(refusals[0]))


class Greetings:
    """The loop that keeps a peer's revocations up to date, and ends the streams of former members.

    Args:
        gate: this peer's.
        greet: see `Greet`.
        neighbors: ids of the peers that this one knows now.
    """

    def __init__(self, gate: MemberGate, greet: Greet, neighbors: Callable[[], Sequence[str]]) -> None:
        self._gate = gate
        self._greet = greet
        self._neighbors = neighbors
        self._warn_once = WarnOnce(logger)

    async def run(self) -> None:
        """Run until it is cancelled."""
        while True:
            has_news = False
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_PERIOD_S):
                    await self._gate.news.wait()
                    has_news = True
            self._gate.news.clear()
            self._gate.end_invalid_streams()
            try:
                self._gate.membership.require_own()
            except NotAMember as error:
                self._warn_once(f"This peer is not a member of the swarm any more: {error}")
            known = self._neighbors()
            wanted = min(GREETED_WITH_NEWS if has_news else GREETED_EACH_PERIOD, len(known))
            for result in (await greet_all(random.sample(known, wanted), self._greet)).values():
                if isinstance(result, MembershipRevoked | MembershipExpired):
                    self._warn_once(str(result))
            self._gate.end_invalid_streams()
