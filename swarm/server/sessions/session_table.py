"""The sessions that a server keeps.

A session reserves `sequences x max_length` tokens of cache when it is opened, and more when it first brings more
sequences. It frees them when it is closed, when its connection has been gone for `RECONNECT_TIMEOUT_S` seconds (so that
a client may reconnect and ask for a lost reply again), or when nothing has arrived for it for `IDLE_TIMEOUT_S` seconds.
A session belongs to the peer that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from swarm.data_structures import Span, WireFormat
from swarm.errors import CacheFull, UnknownSession, WrongSpan
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache
from swarm.protocol.messages import StepReply
from swarm.server.sessions.cache_allocator import MAX_PEER_CACHE_SHARE, CacheAllocator
from swarm.server.sessions.push import PushLink
from swarm.server.sessions.reply_stream import ReplyStream

RECONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 1800.0

EXPIRY_PERIOD_S = 1.0
"""Seconds between looks for expired sessions while somebody waits for room."""

MAX_PEER_SESSIONS = 256

LINK_TIMEOUT_S = 2.0
"""Seconds that a push may be ahead of the client's word that it is allowed."""


@dataclass(eq=False)
class Session:
    """One client's open generation at this server.

    Attributes:
        next_step: the least number that the next step may have. (A step that its client gave up leaves a gap.)
        last: the step before, kept so that its reply can be sent again: fingerprint of the request, reply, payload.
        rows: rows for which cache is reserved.
        adapters: digests of what its client adds to the blocks; the cache has the adapters themselves.
        patience: seconds that its client would rather wait for room than be refused.
        attached: number of open connections that use the session.
        client: the newest of them, to which replies to pushed steps go.
        previous: the peer that may push steps into the session, besides the client itself.
        link: the way to the next server.
        lock: held by the step that is being computed.
        growing: held by who reserves room, so that two connections never reserve the same rows twice.
    """

    session_id: bytes
    peer_id: str
    span: Span
    max_length: int
    reply_format: WireFormat
    cache: SessionCache
    last_seen: float
    next_step: int = 0
    last: tuple[int, StepReply, bytes | memoryview] | None = None
    rows: int = 0
    adapters: list[bytes] | None = None
    patience: float = 0.0
    attached: int = 0
    client: ReplyStream | None = None
    previous: str | None = None
    link: PushLink | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    growing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _linked: asyncio.Event = field(default_factory=asyncio.Event)

    def let_push(self, previous: str | None) -> None:
        """Take pushes from this peer and from no other."""
        self.previous = previous
        self._linked.set()
        self._linked = asyncio.Event()

    async def may_push(self, peer_id: str) -> bool:
        """Whether the peer is allowed to push, or will be in `LINK_TIMEOUT_S` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINK_TIMEOUT_S):
                while self.previous != peer_id:
                    await self._linked.wait()
        return self.previous == peer_id

    def unlink(self) -> None:
        """Push no more."""
        if self.link is not None:
            self.link.close()
            self.link = None


class SessionTable:
    """All sessions of a server.

    Args:
        capacity: tokens of cache that all sessions together may reserve.
        now: clock in seconds.
        peer_share: of the cache, that the sessions of one peer may reserve.
        peer_sessions: sessions that one peer may have.
        page: tokens of the smallest piece that the cache is given out in.
        observer: hears of sessions that come and go.
    """

    def __init__(
        self,
        capacity: int,
        now: Callable[[], float],
        peer_share: float = MAX_PEER_CACHE_SHARE,
        peer_sessions: int = MAX_PEER_SESSIONS,
        page: int = 1,
        observer: ServerObserver | None = None,
    ) -> None:
        self.capacity = capacity // page * page
        self._page = page
        self._accountant = CacheAllocator(self.capacity, peer_share)
        self._peer_sessions = peer_sessions
        self._now = now
        self._sessions: dict[tuple[str, bytes], Session] = {}
        self._observer = observer or ServerObserver()
        self._tell()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def free(self) -> int:
        """Tokens of cache that nobody has reserved."""
        return self._accountant.free

    async def open(self, session: Session, rows: int = 1, client: ReplyStream | None = None) -> Session:
        """Register the session with room for so many rows, or return the same client's session of that id.

        Args:
            client: the connection that uses it from now on.

        Raises:
            WrongSpan: the id is in use for other blocks or adapters.
            CacheFull: there is no room, or the peer has too many sessions.
        """
        self.expire()
        known = self._sessions.get((session.peer_id, session.session_id))
        if known is not None:
            if known.span != session.span or known.max_length != session.max_length:
                raise WrongSpan(f"the session is open for blocks {known.span} and {known.max_length} tokens")
            if known.adapters != session.adapters:
                raise WrongSpan("the session is open with other adapters; open another one")
            session = known
        elif sum(one.peer_id == session.peer_id for one in self._sessions.values()) >= self._peer_sessions:
            raise CacheFull(f"a peer may have {self._peer_sessions} sessions; close some, or ask another server")
        self._sessions[session.peer_id, session.session_id] = session
        session.attached += 1
        session.last_seen = self._now()
        try:
            await self.reserve(session, rows)
        except BaseException:
            self.detach(session)
            if known is None:
                self._forget(session)
            raise
        if known is None:
            self._observer.session_opened()
        session.client = client  # a connection that was refused does not take the place of one that works
        return session

    async def pushed_by(self, previous: str, client: str, session_id: bytes) -> Session:
        """The session of `client` into which the peer `previous` may push.

        Raises `UnknownSession`, also where only the pushing is not allowed: who may not push learns nothing.
        """
        session = self._sessions.get((client, session_id))
        if session is None or not await session.may_push(previous):
            raise UnknownSession("there is no session here into which this peer may push")
        return session

    def clients(self) -> list[ReplyStream]:
        """The connections of all sessions."""
        return [session.client for session in self._sessions.values() if session.client is not None]

    def check(self, session: Session) -> None:
        """Raise `UnknownSession` if the session is not open any more."""
        if self._sessions.get((session.peer_id, session.session_id)) is not session:
            raise UnknownSession("the session has expired; open it again")

    async def reserve(self, session: Session, rows: int) -> None:
        """Make room for `rows` rows in all, or wait for it as long as the session's client wants.

        Raises `CacheFull`, and changes nothing, if there is none, or `UnknownSession` if the session is closed.
        """
        async with session.growing:
            self.check(session)
            more = (rows - session.rows) * self._room(session.max_length)
            if more > 0:
                self.expire()
                try:
                    async with self._expiring(session.patience):
                        await self._accountant.wait(session, session.peer_id, more, session.patience)
                except CacheFull:
                    self.check(session)  # which was closed meanwhile?
                    raise
                self.check(session)
                session.rows = rows
                self._tell()
        session.last_seen = self._now()

    def _room(self, length: int) -> int:
        """Tokens of cache that a row of so many takes: whole pages."""
        return -(-length // self._page) * self._page

    def refuse_waiting(self) -> None:
        """From now on nobody waits for room."""
        self._accountant.close()

    @asynccontextmanager
    async def _expiring(self, patience: float) -> AsyncIterator[None]:
        """Somebody waits for room: look often for sessions whose client is gone."""

        async def look() -> None:
            while True:
                await asyncio.sleep(EXPIRY_PERIOD_S)
                self.expire()

        task = asyncio.create_task(look()) if patience > 0 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    def detach(self, session: Session, client: ReplyStream | None = None) -> None:
        """A connection that used the session has ended."""
        session.attached -= 1
        if client is not None and session.client is client:
            session.client = None
        session.last_seen = self._now()

    def close(self, session: Session, reason: str = "closed") -> None:
        """Forget the session and free its cache. The reason is for the observer."""
        if self._forget(session) and session.rows:  # else it never was open
            self._observer.session_closed(reason)

    def _forget(self, session: Session) -> bool:
        """False if it was forgotten before."""
        if self._sessions.get((session.peer_id, session.session_id)) is not session:
            return False
        del self._sessions[session.peer_id, session.session_id]
        session.unlink()
        self._accountant.give_back(session)
        session.cache.clear()  # its connection may stay, and remember the session
        self._tell()
        return True

    def _tell(self) -> None:
        self._observer.session_totals(len(self), self.capacity - self.free, self.capacity)

    def clear(self) -> None:
        """Close all sessions."""
        for session in list(self._sessions.values()):
            self.close(session, "ended")

    def expire(self) -> None:
        """Close the sessions whose client is gone."""
        now = self._now()
        for session in list(self._sessions.values()):
            if (
                now - session.last_seen > (IDLE_TIMEOUT_S if session.attached else RECONNECT_TIMEOUT_S)
                and not session.lock.locked()
            ):
                self.close(session, "expired")
