"""The sessions that a server keeps.

A session reserves `sequences x max_length` tokens of cache when it is opened, and more when it first brings more
sequences. A token is one position in all blocks of the server, so a session on some of them reserves its share, and
what its last reply takes. It ends when it is closed, when its connection has been gone for `RECONNECT_TIMEOUT_S`
seconds (until then its client may reconnect and ask for a lost reply), or when nothing has arrived for `IDLE_TIMEOUT_S`
seconds. If another session needs its cache, it may be asked to leave before (`swarm.server.memory`).

What a client wants to be kept of a session that it closes is kept in what no session has reserved (`ParkedCaches`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from swarm.data_structures import Span
from swarm.errors import CacheFull, UnknownSession, WrongPosition, WrongSpan
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache
from swarm.protocol.messages import MAX_PEER_SESSIONS, PrefixOf
from swarm.server.memory import KEPT_CACHE_SHARE, MAX_PEER_CACHE_SHARE, HeldCache, MemoryPool, choose_leaving
from swarm.server.sessions.parked_caches import ParkedCache, ParkedCaches
from swarm.server.sessions.reply_stream import ReplyStream
from swarm.server.sessions.session import LINK_TIMEOUT_S, Session, SessionTerms

RECONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 1800.0

CopyCache = Callable[[SessionCache, SessionCache, int], Awaitable[None]]
"""Copies the first positions of the second cache into the first one."""


@dataclass(frozen=True)
class CacheSizes:
    """What a session keeps in a server's blocks, in bytes or in any other unit of memory.

    Attributes:
        span: the server's blocks.
        token: what one position takes in each of them.
        state: what a sequence takes in each, however long it is; 0 for blocks without a state.
        token_buffer: what a session keeps of each position besides, whatever its blocks.
        sequence_buffer: what it keeps of each sequence besides, if its blocks have states.
        unit: what a token of the server's cache is, of all blocks.
    """

    span: Span
    token: tuple[int, ...]
    state: tuple[int, ...]
    token_buffer: int
    sequence_buffer: int
    unit: int

    def tokens(self, span: Span, sequences: int, max_length: int) -> int:
        """Tokens of cache that sequences take in some of the blocks, rounded up."""
        blocks = slice(span.start - self.span.start, span.end - self.span.start)
        states = sum(self.state[blocks])
        one = max_length * (sum(self.token[blocks]) + self.token_buffer)
        if states:
            one += states + self.sequence_buffer
        return -(-sequences * one // self.unit)


class SessionTable:
    """All sessions of a server.

    Args:
        capacity: tokens of cache that all sessions together may reserve.
        now: clock in seconds.
        peer_share: share of the cache that the sessions of one peer may reserve.
        page: tokens of the smallest piece in which cache is given out.
        sizes: what a session keeps in each of the server's blocks; None if a session on some of them takes as much
            cache as one on all of them, and the same for each token.
        observer: is told of sessions that open and close.

    Attributes:
        parked: caches of sessions that have ended.
        ask_to_leave: tells the client of a session that the session is over, because others need its cache.
        on_closed: is told of each session that is over.
    """

    def __init__(
        self,
        capacity: int,
        now: Callable[[], float],
        peer_share: float = MAX_PEER_CACHE_SHARE,
        page: int = 1,
        sizes: CacheSizes | None = None,
        observer: ServerObserver | None = None,
    ) -> None:
        self.capacity = capacity // page * page
        self._page = page
        self._sizes = sizes
        self._pool = MemoryPool(self.capacity, peer_share)
        self.parked = ParkedCaches(self.tokens_reserved)
        self.ask_to_leave: Callable[[Session], None] = lambda session: None
        self.on_closed: Callable[[Session], None] = lambda session: None
        self._now = now
        self._sessions: dict[tuple[str, bytes], Session] = {}
        self._observer = observer or ServerObserver()
        self._report()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def quota(self) -> int:
        """Tokens of cache that the sessions of one peer may reserve."""
        return self._pool.quota

    @property
    def free(self) -> int:
        """Tokens of cache that are not reserved."""
        return self._pool.free

    async def open_session(
        self,
        session: Session,
        sequences: int = 1,
        client: ReplyStream | None = None,
        prefix: PrefixOf | None = None,
        copy: CopyCache | None = None,
    ) -> Session:
        """Register the session with cache for `sequences`, or return the session that this client has under its id.

        Args:
            client: the connection that uses it from now on.
            prefix: what a new session begins with, as far as it is still there; `session.begun` says how far.
            copy: copies so many positions of another cache into the session's. May raise `WrongPosition`.

        Raises:
            WrongSpan: the id is in use for other blocks or adapters, or with another `early_exits`.
            CacheFull: there is no free cache, or the peer has too many sessions.
        """
        self.expire()
        terms = session.terms
        known = self._sessions.get(session.key)
        if known is not None:
            if (known.terms.span, known.terms.max_length) != (terms.span, terms.max_length):
                raise WrongSpan(
                    f"the session is open for blocks {known.terms.span} and {known.terms.max_length} tokens"
                )
            if known.terms.adapters != terms.adapters:
                raise WrongSpan("the session is open with other adapters; open another one")
            if known.terms.early_exits != terms.early_exits:
                raise WrongSpan("the session is open with another early_exits; open another one")
            session = known
        elif sum(one.terms.peer_id == terms.peer_id for one in self._sessions.values()) >= MAX_PEER_SESSIONS:
            raise CacheFull(
                f"a peer may have {MAX_PEER_SESSIONS} sessions, also if each uses some blocks only; close some, or "
                "ask another server"
            )
        self._sessions[session.key] = session
        session.attached += 1
        self.note_use(session)
        try:
            parked = await self.reserve_cache(session, sequences, prefix if known is None else None)
            if known is None and prefix is not None and copy is not None:
                await self._begin_with(session, prefix, parked, copy)
                self._observer.prefix_taken(prefix.length, session.begun)
        except BaseException:
            self.detach(session)
            if known is None:
                self._forget(session)
            raise
        if known is None:
            self._observer.session_opened()
        session.client = client  # a connection that was refused does not replace one that works
        return session

    async def _begin_with(
        self, session: Session, prefix: PrefixOf, parked: ParkedCache | None, copy: CopyCache
    ) -> None:
        """Begin a new session with what another one of its client has, or has left (`parked`)."""
        source, length = self._sessions.get((session.terms.peer_id, prefix.session_id)), prefix.length
        if parked is not None:
            terms, cache, length = parked.terms, parked.cache, min(length, parked.length)
        elif source is not None and source is not session:
            terms, cache = source.terms, source.cache.shared()  # it may be closed meanwhile
        else:
            return
        if session.terms.continues(terms) and session.sequences == 1 and length <= session.terms.max_length:
            with suppress(WrongPosition):
                await copy(session.cache, cache, length)
                session.begun, session.begun_with = length, prefix.session_id
            self.require_open(session)

    async def find_for_push(self, previous_peer: str, client: str, session_id: bytes, sequences: int = 1) -> Session:
        """The session of `client` into which `previous_peer` may push a step of so many sequences.

        Raises `UnknownSession`, after the same time whether there is no such session, or the peer may not push there:
        it learns nothing about it.
        """
        session = self._sessions.get((client, session_id))
        if session is not None and await session.may_push(previous_peer, sequences):
            return session
        if session is None:
            await asyncio.sleep(LINK_TIMEOUT_S)
        raise UnknownSession("there is no session here into which this peer may push")

    def clients(self) -> list[ReplyStream]:
        """The connections of all sessions."""
        return [session.client for session in self._sessions.values() if session.client is not None]

    def require_open(self, session: Session) -> None:
        """Raise `UnknownSession` if the session is not open any more."""
        if self._sessions.get(session.key) is not session:
            raise UnknownSession("the session has expired; open it again")

    async def reserve_cache(
        self, session: Session, sequences: int, prefix: PrefixOf | None = None
    ) -> ParkedCache | None:
        """Reserve cache for `sequences` in all, waiting for it as long as the session's client allows.

        Returns what is kept of `prefix`; its room may be the session's from now on.

        Raises `CacheFull`, and changes nothing, if there is none, or `UnknownSession` if the session is closed.
        """
        terms, parked = session.terms, None
        async with session.reserving:
            self.require_open(session)
            more = self.tokens_reserved(terms, sequences) - self.tokens_reserved(terms, session.sequences)
            if more > 0:
                try:
                    make_room = functools.partial(self._make_room, session, more)
                    await self._pool.charge_or_wait(
                        session, terms.peer_id, more, terms.wait_timeout_s, make_room, terms.weight
                    )
                except CacheFull:
                    self.require_open(session)  # it may have been closed meanwhile
                    raise
                self.require_open(session)
                session.sequences = sequences
                parked = self.parked.find(terms.peer_id, prefix.session_id) if prefix is not None else None
                self.parked.fit(self.free, parked)
                self._report()
        self.note_use(session)
        return parked

    def note_use(self, session: Session) -> None:
        """Something has arrived for the session."""
        session.last_seen = self._now()

    def tokens_reserved(self, terms: SessionTerms, sequences: int = 1) -> int:
        """Tokens of cache that these sequences take: whole pages, or what the session's blocks and buffers take."""
        if self._sizes is not None:
            return self._sizes.tokens(terms.span, sequences, terms.max_length)
        return sequences * -(-terms.max_length // self._page) * self._page

    def refuse_waiting(self) -> None:
        """From now on no session waits for cache."""
        self._pool.refuse_waiting()

    def _make_room(self, session: Session, tokens: int) -> None:
        """Close what has expired and, if the session still cannot have so many tokens more, what gives way to it."""
        self.expire()
        peer, now = session.terms.peer_id, self._now()
        held = [
            HeldCache(
                one,
                one.terms.peer_id,
                self._pool.held_by(one),
                0.0 if one.is_busy or one.reserving.locked() else now - one.last_seen,
            )
            for one in self._sessions.values()
            if one is not session
        ]
        wanted = self._pool.held_by_peer(peer) + tokens
        for leaving in choose_leaving(held, peer, tokens - self.free, wanted, self.capacity * KEPT_CACHE_SHARE):
            self.ask_to_leave(leaving)
            self.close(leaving, "asked_to_leave")

    def detach(self, session: Session, client: ReplyStream | None = None) -> None:
        """A connection that used the session has ended."""
        session.attached -= 1
        if client is not None and session.client is client:
            session.client = None
        self.note_use(session)

    def close(self, session: Session, reason: str = "closed", keep: int = 0) -> None:
        """Forget the session and free its cache.

        Args:
            reason: for the observer.
            keep: positions to be kept for the client's next session; none if it has more than one sequence.
        """
        kept = None
        if keep and session.sequences == 1 and not session.terms.early_exits:
            kept = session.cache.shared()
        if self._forget(session) and session.sequences:  # otherwise it was never open
            self._observer.session_closed(reason)
            if kept is not None:
                self.parked.put(session.terms, kept, keep, session.begun_with)
                self.parked.fit(self.free)
                self._report()

    def _forget(self, session: Session) -> bool:
        """Returns False if it was forgotten before."""
        if self._sessions.get(session.key) is not session:
            return False
        del self._sessions[session.key]
        session.close_push_link()
        session.abandon_step()  # before others get its cache
        session.cache.clear()  # its connection may stay open and keep the session in memory
        session.last = None
        self._pool.release(session)
        self.on_closed(session)
        self._report()
        return True

    def _report(self) -> None:
        self._observer.session_totals(len(self), self.capacity - self.free, self.capacity)
        self._observer.parked_total(self.parked.tokens)

    def clear(self) -> None:
        """Close all sessions."""
        for session in list(self._sessions.values()):
            self.close(session, "ended")
        self.parked.clear()

    def expire(self) -> None:
        """Close the sessions whose client is gone."""
        now = self._now()
        for session in list(self._sessions.values()):
            timeout_s = IDLE_TIMEOUT_S if session.attached else RECONNECT_TIMEOUT_S
            if now - session.last_seen > timeout_s and not session.lock.locked():
                self.close(session, "expired")
