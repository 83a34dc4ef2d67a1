"""Where a server looks at points, counts what their owners have, and keeps the tabs that they sign for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from swarm.common.files.atomic_file import replace_file
from swarm.errors import ProtocolViolation
from swarm.metrics.server import ServerObserver
from swarm.protocol.messages import Points, Signed
from swarm.server.sessions.session import Session
from swarm.trust.points import (
    CONTRIBUTOR_WEIGHT,
    Ledger,
    Spender,
    Tab,
    encode_owners,
    read_claim,
    read_owners,
    read_points,
)

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 60.0
"""How often what has changed is written to the file, at most."""


class PointsDesk:
    """The points of one server, in memory and in a file. It outlives the blocks that the server holds.

    Raises `PointsFileError` if the file that is there cannot be read.

    Args:
        server: its peer id.
        path: where the accounts are kept; None to forget them when the server ends.
        vouchers: owners whose word counts without being owed anything.
        observer: is told of what owners sign for.
        now: Unix time in seconds.
    """

    def __init__(
        self,
        server: str,
        path: Path | None = None,
        vouchers: Collection[str] = (),
        observer: ServerObserver | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._observer = observer or ServerObserver()
        self._now = now
        self._ledger = Ledger(server, vouchers, read_owners(path) if path is not None else None)
        self._saved_at = now()
        self._changed = False

    async def admit(self, points: Points | None, client: str) -> tuple[Spender | None, float]:
        """Whose points a client spends, if it may, and the weight of its session. Raises `ProtocolViolation`."""
        if points is None:
            return None, 1.0
        now = self._now()
        spender = await asyncio.to_thread(read_points, points, client, now)
        has_points = spender is not None and self._ledger.credit(spender, now) > 0
        return spender, CONTRIBUTOR_WEIGHT if has_points else 1.0

    def newest_tab(self, spender: Spender | None) -> Signed | None:
        """The newest tab that an owner has signed for this server."""
        return self._ledger.account(spender.owner).tab if spender is not None else None

    def charge(self, session: Session) -> None:
        """Count what a session was served since the last time."""
        if session.terms.spender is not None:
            amount = session.token_blocks - session.charged
            if amount > 0:
                session.charged += amount
                self._ledger.charge(session.terms.spender, amount, self._now())
                self._changed = True

    async def keep(self, session: Session, signed: Signed) -> Signed | None:
        """Keep the tab of a session's owner; the newest that there is. Raises `ProtocolViolation` if it is not one."""
        tab, spender = await asyncio.to_thread(read_claim, signed, Tab), session.terms.spender
        if spender is None:
            return None
        if tab.owner != spender.owner:
            raise ProtocolViolation(f"a tab of {tab.owner} in a session with the points of {spender.owner}")
        before = self._ledger.account(tab.owner).acknowledged
        self.charge(session)
        newest = self._ledger.sign(tab, signed, self._now())
        self._observer.points_signed(self._ledger.account(tab.owner).acknowledged - before)
        self._changed = True
        return newest

    async def save(self) -> None:
        """Write to the file what has changed, now and then."""
        if self._now() - self._saved_at >= SAVE_PERIOD_S:
            await self.close()

    async def close(self) -> None:
        """Write to the file what has changed."""
        self._saved_at = self._now()
        if self._path is None or not self._changed:
            return
        self._changed = False
        content = encode_owners(self._ledger.owners)
        try:
            await asyncio.to_thread(replace_file, self._path, content)
        except OSError as error:
            logger.warning("the points cannot be saved in %s: %s", self._path, error.strerror or error)
