"""A running hash over what one session of a server was given and what it gave. Pure.

The server keeps it, and so does its client for each server of its route. Both take in the same steps in the same order,
so their hashes are equal, without a message that would say so. The server signs it when it is asked to
(`swarm.trust.receipts`).

    given(n) = SHA-256(given(n - 1) | checksum of what step n brought)
    gave(n)  = SHA-256(gave(n - 1)  | checksum of its outputs, as the step that they are at the next server)

So where all servers of a route have computed the same steps, what one was given is what the one before gave: their
roots are equal, and anybody who has the receipts can see it.

Only steps that stand count. A step that begins an epoch says which one it follows; what came after that is taken out. A
replay from the first token on begins the record again: what was computed before is no longer in the cache.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from swarm.protocol.input_checksum import LaterChecksum
from swarm.protocol.messages import CHECKSUM_BYTES, ReplayRequest

KEPT_STEPS = 64
"""Newest steps whose hashes are kept, because a client may ask for a receipt up to one of them, or give up those behind
it. Clients have at most half as many under way."""

NO_OUTPUTS = bytes(CHECKSUM_BYTES)
"""The checksum of outputs that nobody asked for."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a session has come to with one of its steps.

    Attributes:
        number: of the step.
        steps: how many stand.
        tokens: that they have brought.
        replayed_tokens: that came in replays.
        given: the root of what it was given.
        gave: the root of what it gave.
        is_replay: whether the last of it was a replay, which brings only what stands.
    """

    number: int = -1
    steps: int = 0
    tokens: int = 0
    replayed_tokens: int = 0
    given: bytes = bytes(CHECKSUM_BYTES)
    gave: bytes = bytes(CHECKSUM_BYTES)
    is_replay: bool = False

    def after(self, entry: _Entry, gave: bytes) -> Totals:
        """The totals with one more step or replay, which gave that."""
        steps, tokens, replayed = (0, 0, entry.tokens) if entry.is_replay else (1, entry.tokens, 0)
        return Totals(
            entry.number,
            self.steps + steps,
            self.tokens + tokens,
            self.replayed_tokens + replayed,
            hashlib.sha256(self.given + entry.given).digest(),
            hashlib.sha256(self.gave + gave).digest(),
            entry.is_replay,
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A step or replay that is not hashed yet."""

    number: int
    tokens: int
    given: bytes
    gave: LaterChecksum | bytes
    is_replay: bool


class SessionRecord:
    """The record of one session, as its server or its client keeps it.

    The checksum of outputs may be computed later, in another thread; meanwhile the entry waits.
    """

    def __init__(self) -> None:
        self._known: deque[Totals] = deque(maxlen=KEPT_STEPS)
        self._waiting: deque[_Entry] = deque()

    @property
    def last(self) -> int | None:
        """Number of the newest step in it; None if it is empty."""
        newest = self._waiting or self._known
        return newest[-1].number if newest else None

    @property
    def tokens(self) -> int:
        """All that steps and replays have brought that stand."""
        known = self._known[-1].tokens + self._known[-1].replayed_tokens if self._known else 0
        return known + sum(entry.tokens for entry in self._waiting)

    def add_step(self, given: bytes, gave: LaterChecksum) -> None:
        """A step was computed: the checksums of what went in and of what came out."""
        request = gave.request
        if request.epoch == request.step:
            self.drop_after(request.follows)
        self._add(_Entry(request.step, sum(request.counts), given, gave, is_replay=False))

    def add_replay(self, request: ReplayRequest, given: bytes, gave: bytes | memoryview | None) -> None:
        """The cache was filled with past inputs; `gave` are the bytes of the outputs, None if none were asked for."""
        if not any(request.starts):
            self.clear()
        checksum = hashlib.sha256(gave).digest() if gave is not None else NO_OUTPUTS
        self._add(_Entry(request.next_step - 1, sum(request.counts), given, checksum, is_replay=True))

    def drop_after(self, number: int | None) -> None:
        """The steps behind `number` do not stand; None: no step stands."""
        newest: deque[_Entry] | deque[Totals]
        for newest in (self._waiting, self._known):
            while newest and not newest[-1].is_replay and (number is None or newest[-1].number > number):
                newest.pop()
            if newest:
                return

    def clear(self) -> None:
        """Begin again."""
        self._known.clear()
        self._waiting.clear()

    def totals(self, number: int) -> Totals | None:
        """What the session has come to with step `number`; None if that is not among the newest that stand.

        Computes the checksums that are waited for.
        """
        self._fold(all_of_them=True)
        return next((known for known in reversed(self._known) if known.number == number), None)

    def _add(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        self._fold(all_of_them=len(self._waiting) > KEPT_STEPS)

    def _fold(self, *, all_of_them: bool) -> None:
        """Hash the oldest entries, as far as their checksums are known."""
        while self._waiting:
            entry = self._waiting[0]
            gave = entry.gave
            if isinstance(gave, LaterChecksum):
                if not all_of_them and not gave.is_known:
                    return
                gave = gave.value
            self._known.append((self._known[-1] if self._known else Totals()).after(entry, gave))
            self._waiting.popleft()
