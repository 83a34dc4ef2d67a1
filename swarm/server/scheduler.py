"""What a server computes next: iteration-level batching. Pure; no torch, no clock.

Every iteration merges tokens of many requests into one forward. The laws:

- Only requests for the same blocks go together. Blocks whose requests have waited longest come first.
- Inference goes before training, which still gets an iteration now and then.
- Short requests (decoding: a few tokens a row) go into every iteration. Long ones (prompts) are cut into chunks, which
  take what is left of the token budget, and at least a share of it.
- Among sessions, who was served least goes first (start-time fair queueing, Goyal et al. 1996): a session that was
  idle does not save up. When tokens are scarce, no peer gets more than its equal part, however many sessions it opens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from swarm.data_structures import Span

SHORT = 16
"""Tokens a row that a short request brings at most: a decode step, or candidates of speculative decoding."""

LONG_SHARE = 0.25
"""Of the budget, for long requests while short ones fill the rest."""

TRAINING_PATIENCE = 2.0
"""Seconds after which training gets an iteration, however much inference waits."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request with tokens left to compute.

    Attributes:
        number: of the request; smaller ones came earlier.
        span: the blocks that it needs.
        peer: who asked.
        session: what shares are counted by.
        tokens: left to compute.
        short: see `SHORT`.
        training: nobody waits for the next token.
        idle: seconds since it came or was last served.
    """

    number: int
    span: Span
    peer: str
    session: Hashable
    tokens: int
    short: bool
    training: bool
    idle: float


@dataclass(frozen=True, slots=True)
class Portion:
    """So many tokens of a request."""

    number: int
    tokens: int


@dataclass
class Shares:
    """How much each session was served, in tokens, on a common virtual clock."""

    _served: dict[Hashable, float] = field(default_factory=dict)
    _now: float = 0.0

    def of(self, session: Hashable) -> float:
        """Where the session stands: less means sooner. Who was idle begins where the others are."""
        return max(self._served.get(session, 0.0), self._now)

    def charge(self, batch: Sequence[tuple[Hashable, int]]) -> None:
        """Sessions were served so many tokens each."""
        starts = {session: self.of(session) for session, _ in batch}
        for session, tokens in batch:
            self._served[session] = self.of(session) + tokens
        # The clock stands where the least served of them began; who is behind it needs no memory of its own.
        self._now = max(self._now, min(starts.values(), default=self._now))
        self._served = {session: served for session, served in self._served.items() if served > self._now}


def next_batch(waiting: Sequence[Waiting], shares: Shares, budget: int) -> list[Portion]:
    """The next iteration: at most `budget` tokens, all for the same blocks. Empty only if nothing waits."""
    candidates = _class(waiting)
    if not candidates:
        return []
    span = max(candidates, key=lambda one: (one.idle, -one.number)).span
    together = [one for one in candidates if one.span == span]
    queue = sorted(together, key=lambda one: (shares.of(one.session), one.number))
    short, long = [one for one in queue if one.short], [one for one in queue if not one.short]
    kept = min(int(budget * LONG_SHARE), sum(one.tokens for one in long))
    portions = _filled(short, max(1, budget - kept) if short else 0)
    portions += _filled(long, budget - sum(portion.tokens for portion in portions))
    return portions


def _class(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Inference, or training where there is none or it has waited long enough."""
    inference = [one for one in waiting if not one.training]
    training = [one for one in waiting if one.training]
    impatient = any(one.idle >= TRAINING_PATIENCE for one in training)
    return training if impatient or not inference else inference


def _filled(queue: Sequence[Waiting], room: int) -> list[Portion]:
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
    return [Portion(number, tokens) for number, tokens in given.items() if tokens]
