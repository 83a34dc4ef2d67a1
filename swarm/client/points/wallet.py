"""Spends the points of an owner, and signs for what its clients were served."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from swarm.common.large_payloads import in_thread
from swarm.errors import IdentityError, PointsFileError, ProtocolViolation
from swarm.protocol.messages import MAX_SHOWN_TABS, Points, Signed
from swarm.transport.identity import load_or_create
from swarm.trust.points import GRANT_S, Grant, Owner, Tab, points_path, read_claim, read_owners, sign_claim

logger = logging.getLogger(__name__)

REREAD_S = 60.0
"""How often the owner's file of points is read again."""

MAX_ATTEMPTS = 10
"""How often a tab is signed again because another client of the owner has signed one meanwhile."""


class Wallet:
    """The points of one owner, as one of its clients spends them.

    Reads what others owe the owner from the file of its server (`points_path`), if that is there. Its methods are for
    one thread, the network thread. Raises `IdentityError` or `PointsFileError` if a file cannot be used.

    Args:
        identity: file of the owner's key.
        now: Unix time in seconds.
    """

    def __init__(self, identity: Path, now: Callable[[], float] = time.time) -> None:
        if not identity.exists():
            raise IdentityError(
                f"there is no key {identity} whose points could be spent; give the --identity-path of your server, or "
                f"make one with: swarm points {identity} --new"
            )
        self._owner = load_or_create(identity)
        self._now = now
        self._path = points_path(identity)
        self._note_earned(read_owners(self._path))
        self._read_at = now()
        self._granted: tuple[float, Signed] | None = None
        self._totals: dict[str, int] = {}
        self._signing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def points_for(self, server: str, client: str) -> Points:
        """What this client shows a server: its right to spend, and tabs of those who had most of the owner's server."""
        now = self._now()
        if self._granted is None or self._granted[0] < now + GRANT_S / 2:
            grant = Grant(self._owner.peer_id, client, int(now) + GRANT_S)
            self._granted = grant.until, await in_thread(sign_claim, grant, self._owner.sign)
        if now - self._read_at >= REREAD_S:
            self._read_at = now
            try:
                self._note_earned(await in_thread(read_owners, self._path))
            except PointsFileError as error:
                logger.warning("%s", error)

        shown = dict.fromkeys((server, *self._most)) if server in self._earned else self._most
        return Points(self._granted[1], tuple(self._earned[peer] for peer in (*shown,)[:MAX_SHOWN_TABS]))

    def _note_earned(self, owners: dict[str, Owner]) -> None:
        """Whose tabs there are now, and who had most."""
        self._earned = {peer: known.tab for peer, known in owners.items() if known.tab is not None}
        # Not by what they signed: anybody can sign for more than it has had.
        self._most = heapq.nlargest(MAX_SHOWN_TABS, self._earned, key=lambda peer: owners[peer].acknowledged)

    def note_tab(self, server: str, newest: Signed | None) -> None:
        """The newest tab that a server has of the owner. Raises `ProtocolViolation` if it is not one."""
        if newest is None:
            self._totals[server] = 0
            return
        tab = read_claim(newest, Tab)
        if (tab.owner, tab.holder) != (self._owner.peer_id, server):
            raise ProtocolViolation(f"{server} shows a tab for {tab.holder} instead of its own")
        self._totals[server] = tab.total

    async def sign(self, server: str, amount: int, send: Callable[[Signed], Awaitable[Signed | None]]) -> None:
        """Sign for so many token-blocks more. Raises `ProtocolViolation`, or what `send` raises.

        Args:
            send: gives the server a tab; the newest that it has then.
        """
        if server == self._owner.peer_id or amount <= 0:
            return
        async with self._signing[server]:
            for _ in range(MAX_ATTEMPTS):
                tab = Tab(self._owner.peer_id, server, self._totals.get(server, 0) + amount)
                signed = await in_thread(sign_claim, tab, self._owner.sign)
                newest = await send(signed)
                if newest is None:
                    return  # it keeps none
                self.note_tab(server, newest)
                if newest == signed:
                    return
