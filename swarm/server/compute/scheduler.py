"""What a server computes next: iteration-level batching. Pure; no torch, no clock.

Every iteration merges tokens of many requests into one forward. The laws:

- Only requests for the same blocks go together. Blocks whose requests have waited longest come first.
- Inference goes before training, which still gets an iteration now and then.
- Short requests (decoding: a few tokens a row) go into every iteration. Long ones (prompts) are cut into chunks, which
  take what is left of the token budget, and at least a share of it.
- Among sessions, who was served least goes first (start-time fair queueing, Goyal et al. 1996): a session that was
  idle does not save up. When tokens are scarce, no peer gets more than its equal part, however many sessions it opens.
- What cannot be cut (a backward) gets an iteration of its own when its turn comes, however many tokens it costs.
- Who has waited for long goes before all of these, so that nobody waits for ever, whatever else comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from swarm.data_structures import Span

MAX_SHORT_TOKENS = 16
"""Tokens a row that a short request brings at most: a decode step, or candidates of speculative decoding."""

LONG_BUDGET_SHARE = 0.25
"""Of the budget, for long requests while short ones fill the rest."""

PRIORITY_AFTER_S = 1.0
"""Seconds after which a request goes first, however much its session has had."""

TRAINING_PRIORITY_AFTER_S = 2.0
"""Seconds after which training gets an iteration, however much inference waits."""

OVERDUE_AFTER_S = 30.0
"""Seconds after which a training request goes before others, even if these come from peers that had less."""

MAX_REMEMBERED_SESSIONS = 1024
"""Sessions whose shares are kept, besides those that wait."""


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """A request with tokens left to compute.

    Attributes:
        number: of the request; smaller ones came earlier.
        span: the blocks that it needs.
        peer: who asked.
        session: what shares are counted by.
        tokens: left to compute.
        short: see `MAX_SHORT_TOKENS`.
        training: nobody waits for the next token.
        idle: seconds since it came or was last served; for training, since any training was, if that is less.
        whole: computed in one iteration, alone.
        waited: seconds since it came or was last served itself.
    """

    number: int
    span: Span
    peer: str
    session: Hashable
    tokens: int
    short: bool
    training: bool
    idle: float
    whole: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """So many tokens of a request."""

    number: int
    tokens: int


@dataclass
class FairShares:
    """How much each session was served, in tokens. Inference and training have clocks of their own."""

    _clocks: dict[bool, _VirtualClock] = field(default_factory=lambda: {False: _VirtualClock(), True: _VirtualClock()})

    def __len__(self) -> int:
        return sum(len(clock.served) for clock in self._clocks.values())

    def of(self, one: QueuedTokens) -> float:
        """Where the request's session stands: less means sooner. Who was idle begins where the others are."""
        return self._clocks[one.training].of(one.session)

    def charge(self, waiting: Sequence[QueuedTokens], batch: Sequence[TokenSlice]) -> None:
        """The portions were served, of all that waited."""
        tokens = {portion.number: portion.tokens for portion in batch}
        for training, clock in self._clocks.items():
            ours = [one for one in waiting if one.training == training]
            if any(one.number in tokens for one in ours):
                for one in ours:
                    clock.served[one.session] = clock.of(one.session) + tokens.get(one.number, 0)
                clock.advance({one.session for one in ours if tokens.get(one.number, 0) < one.tokens})


@dataclass
class _VirtualClock:
    """Tokens that sessions were served, as if each had been served `now` tokens at least."""

    served: dict[Hashable, float] = field(default_factory=dict)
    now: float = 0.0

    def of(self, session: Hashable) -> float:
        return max(self.served.get(session, 0.0), self.now)

    def advance(self, waiting: set[Hashable]) -> None:
        """These sessions still wait. The least served of them tells the time; who is behind needs no memory of it.

        Sessions of other blocks count as well, and those that want nothing now do not: else the clock would run away
        from those that wait, or be held up by one that needs little.
        """
        self.now = min(map(self.of, waiting), default=max(self.served.values(), default=self.now))
        ahead = {session: served for session, served in self.served.items() if served > self.now}
        gone = [session for session in ahead if session not in waiting]
        for session in heapq.nsmallest(len(gone) - MAX_REMEMBERED_SESSIONS, gone, key=ahead.__getitem__):
            del ahead[session]
        self.served = ahead


def next_batch(waiting: Sequence[QueuedTokens], shares: FairShares, budget: int) -> list[TokenSlice]:
    """The next iteration: all for the same blocks, at most `budget` tokens unless it is one request that is computed
    whole. Empty only if nothing waits."""
    candidates = _class(waiting)
    if not candidates:
        return []
    oldest = max(candidates, key=lambda one: (_age(one), -one.number))
    queue = sorted((one for one in candidates if one.span == oldest.span), key=lambda one: _turn(one, shares))
    if queue[0].whole:
        return [TokenSlice(queue[0].number, queue[0].tokens)]
    queue = [one for one in queue if not one.whole]
    short, long = [one for one in queue if one.short], [one for one in queue if not one.short]
    # The oldest decides which blocks compute, so it must not go away empty.
    least = 0 if oldest.short else 1
    kept = min(max(least, int(budget * LONG_BUDGET_SHARE)), sum(one.tokens for one in long))
    portions = _filled(short, budget - kept)
    portions += _filled(long, budget - sum(portion.tokens for portion in portions))
    return portions


def _turn(one: QueuedTokens, shares: FairShares) -> tuple[bool, float, int]:
    """What requests are sorted by."""
    impatient = _age(one) >= PRIORITY_AFTER_S
    return not impatient, -_age(one) if impatient else shares.of(one), one.number


def _age(one: QueuedTokens) -> float:
    """Seconds that a request has waited, as far as that counts."""
    return one.waited if one.waited >= OVERDUE_AFTER_S else one.idle


def _class(waiting: Sequence[QueuedTokens]) -> list[QueuedTokens]:
    """Inference, or training where there is none or it has waited long enough."""
    inference = [one for one in waiting if not one.training]
    training = [one for one in waiting if one.training]
    impatient = any(one.idle >= TRAINING_PRIORITY_AFTER_S for one in training)
    return training if impatient or not inference else inference


def _filled(queue: Sequence[QueuedTokens], room: int) -> list[TokenSlice]:
    """Tokens for the requests of a queue, in order, at most `room` in all and at most its equal part for each peer.

    What peers leave of their parts goes round again, so no room stays empty while a request waits.
    """
    given = dict.fromkeys((one.number for one in queue), 0)
    open_ = [one for one in queue if one.tokens]
    while room > 0 and open_:
        peers = len({one.peer for one in open_})
        left = dict.fromkeys((one.peer for one in open_), max(1, room // peers))
        for one in open_:
            tokens = min(one.tokens - given[one.number], left[one.peer], room)
            given[one.number] += tokens
            left[one.peer] -= tokens
            room -= tokens
        open_ = [one for one in open_ if given[one.number] < one.tokens]
    return [TokenSlice(number, tokens) for number, tokens in given.items() if tokens]
