"""Caches of sessions that have ended, kept for the next sessions of their clients that begin with the same tokens.

They take only what no session has reserved, and are not charged to any: `fit` is told how much is free. If that is too
little, the client with the most parked tokens loses the tail of its least recently used cache first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.errors import WrongPosition
from swarm.models.execution.session_cache import SessionCache
from swarm.server.sessions.session import SessionTerms

logger = logging.getLogger(__name__)

MIN_PARKED_TOKENS = 16
"""Positions below which a cache is not kept: to compute them again takes one step."""

MAX_PARKED = 1024
"""Caches that are kept, of all clients."""


@dataclass(eq=False)
class ParkedCache:
    """One cache.

    Attributes:
        terms: of the session that left it; `max_length` is how many positions it has.
        tokens: what it takes of the server's cache.
    """

    terms: SessionTerms
    cache: SessionCache
    tokens: int

    @property
    def length(self) -> int:
        """How many positions it has."""
        return self.terms.max_length


class ParkedCaches:
    """All caches that are kept at a server.

    Args:
        tokens_reserved: what a session of these terms takes of the server's cache.

    Attributes:
        tokens: what all of them take.
        run_later: has a job run in the thread that computes steps, before any step that comes later.
    """

    def __init__(self, tokens_reserved: Callable[[SessionTerms], int]) -> None:
        self.tokens = 0
        self.run_later: Callable[[Callable[[], None]], object] = lambda job: job()
        self._tokens_reserved = tokens_reserved
        self._caches: dict[tuple[str, bytes], ParkedCache] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._caches)

    def put(self, terms: SessionTerms, cache: SessionCache, length: int, before: bytes | None = None) -> None:
        """Keep the first `length` positions of a session that has ended. `fit` has to follow.

        Args:
            before: the session with which it began. What that has left is not kept if this has all of it.
        """
        if length < MIN_PARKED_TOKENS or length > max(cache.lengths[:1], default=0):
            return
        terms = replace(terms, max_length=length, spender=None)
        for former in (terms.session_id, before):  # a client may use an id again
            same = self._caches.get((terms.peer_id, former)) if former is not None else None
            if same is not None and (former == terms.session_id or same.length <= length):
                self.drop(same)
        parked = ParkedCache(terms, cache, self._tokens_reserved(terms))
        self._caches[terms.peer_id, terms.session_id] = parked
        self.tokens += parked.tokens
        self._trim_later(cache, length)

    def find(self, peer_id: str, session_id: bytes) -> ParkedCache | None:
        """What a client's session has left, which is the most recently used one now; None if it is not kept."""
        found = self._caches.pop((peer_id, session_id), None)
        if found is not None:
            self._caches[peer_id, session_id] = found
        return found

    def fit(self, free: int, wanted: ParkedCache | None = None) -> None:
        """Shrink or drop caches until together they take at most `free`, and are at most `MAX_PARKED`.

        Args:
            wanted: what a session is going to copy, within what is reserved for it: it goes last, and whole.
        """
        held = Counter[str]()
        for one in self._caches.values():
            held[one.terms.peer_id] += one.tokens if one is not wanted else 0
        while self._caches and (self.tokens > free or len(self._caches) > MAX_PARKED):
            most = max(held, key=lambda peer: held[peer])
            mine = (one for one in self._caches.values() if one.terms.peer_id == most and one is not wanted)
            first = next(mine, wanted)
            if first is None:
                break
            before = self.tokens
            if first is wanted or self.tokens <= free:
                self.drop(first)
            else:
                self._shrink(first, self.tokens - free)
            held[most] -= before - self.tokens

    def drop(self, parked: ParkedCache) -> None:
        """Keep it no longer."""
        key = parked.terms.peer_id, parked.terms.session_id
        if self._caches.get(key) is parked:
            del self._caches[key]
            self.tokens -= parked.tokens

    def clear(self) -> None:
        """Keep nothing."""
        self._caches.clear()
        self.tokens = 0

    def _shrink(self, parked: ParkedCache, tokens: int) -> None:
        """Free so many tokens, or all that it has."""
        length = parked.length * (parked.tokens - tokens) // parked.tokens
        terms = replace(parked.terms, max_length=max(1, length))
        left = self._tokens_reserved(terms)
        if length < MIN_PARKED_TOKENS or left > parked.tokens - tokens or parked.cache.model.has_states:
            self.drop(parked)
            return
        self.tokens -= parked.tokens - left
        parked.terms, parked.tokens = terms, left
        self._trim_later(parked.cache, length)

    def _trim_later(self, cache: SessionCache, length: int) -> None:
        def trim() -> None:
            try:
                cache.trim(length)
            except WrongPosition as error:  # a step that was given up has set it back
                logger.debug("a cache of %d positions cannot be kept: %s", length, error)
                cache.clear()

        self.run_later(trim)
