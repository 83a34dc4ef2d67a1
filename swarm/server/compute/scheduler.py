"""What a server computes next: iteration-level batching. Pure; no torch, no clock.

Every iteration merges tokens of many requests into one forward. The rules:

- The request that has waited longest decides which blocks the iteration computes. Those that need the same blocks, or
  some of them if one pass can serve both, go with it: each joins it in front of its first block, and all get their
  outputs when the pass ends.
- Inference goes before training, which still gets an iteration now and then.
- Short requests (decoding: a few tokens for each sequence) go into every iteration. Long ones (prompts) are cut into
  chunks, which take what is left of the token budget, and at least a share of it.
- Short requests whose clients may have what they need from the blocks before (`urgent` is false) let urgent ones go
  first, for `MAX_YIELD_S` at most. An iteration takes one of their tokens along for `TOKENS_PER_YIELDING` others: that
  costs it little, and they are not in the way later.
- Among sessions, the one that was served least goes first (start-time fair queueing, Goyal et al. 1996), where a token
  counts with the blocks that it passes; a session that was idle does not save up credit. When tokens are scarce, no
  peer gets more than an equal part, however many sessions it opens.
- A session with points (`swarm.trust.points`) counts as several: it gets as many times more tokens, and its waiting
  time counts as many times. Those without get what is left, and their turn comes all the same.
- A request that cannot be cut (a backward) gets an iteration of its own when its turn comes, whatever it costs.
- A request that has waited long goes before all of these, so that no request waits for ever, whatever else comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from swarm.data_structures import Span

MAX_SHORT_TOKENS = 16
"""Most tokens for each sequence of a short request: a decode step, or the candidates of speculative decoding."""

LONG_BUDGET_SHARE = 0.25
"""Share of the budget that is kept for long requests while short ones fill the rest."""

PRIORITY_AFTER_S = 1.0
"""A request that has waited for this long goes first, however much its session has had."""

TRAINING_PRIORITY_AFTER_S = 2.0
"""Training gets an iteration after this time, however much inference waits."""

MAX_YIELD_S = 0.05
"""How long a request that is not urgent lets urgent ones go first."""

TOKENS_PER_YIELDING = 2
"""Tokens of an iteration for each token that it takes along of requests that let others go first."""

OVERDUE_AFTER_S = 30.0
"""After this time a training request goes before others, even if these come from peers that had less."""

MAX_REMEMBERED_SESSIONS = 1024
"""Sessions whose shares are kept, in addition to those that wait."""


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """A request with tokens left to compute.

    Attributes:
        number: of the request; smaller ones came earlier.
        span: the blocks that it needs.
        peer: the client.
        session: what shares are counted by.
        tokens: left to compute.
        short: see `MAX_SHORT_TOKENS`.
        training: no generation waits for it.
        idle: seconds since it came or was last served; for training, since any training was served, if that is less.
        whole: computed in one iteration, alone.
        waited: seconds since it came or was last served itself.
        urgent: a client waits for it.
        joins_parts: whether it may share an iteration with requests for overlapping blocks.
        token_cost: of each token, in blocks.
        weight: as how many sessions its session counts.
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
    urgent: bool = True
    joins_parts: bool = False
    token_cost: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """A number of tokens of one request."""

    number: int
    tokens: int


@dataclass
class FairShares:
    """What each session was served: tokens times what each cost. Inference and training have separate clocks."""

    _clocks: dict[bool, _VirtualClock] = field(default_factory=lambda: {False: _VirtualClock(), True: _VirtualClock()})

    def __len__(self) -> int:
        return sum(len(clock.served) for clock in self._clocks.values())

    def served(self, request: QueuedTokens) -> float:
        """Where the request's session stands; the least goes first. One that was idle starts where the others are."""
        return self._clocks[request.training].served_so_far(request.session)

    def charge_batch(self, waiting: Sequence[QueuedTokens], batch: Sequence[TokenSlice]) -> None:
        """Count the slices of a batch, which was chosen from all that waited."""
        tokens = {part.number: part.tokens for part in batch}
        for training, clock in self._clocks.items():
            ours = [request for request in waiting if request.training == training]
            if any(request.number in tokens for request in ours):
                for request in ours:
                    cost = tokens.get(request.number, 0) * request.token_cost / request.weight
                    clock.served[request.session] = clock.served_so_far(request.session) + cost
                clock.advance({request.session for request in ours if tokens.get(request.number, 0) < request.tokens})


@dataclass
class _VirtualClock:
    """What sessions were served, as if each had been served `now` at least."""

    served: dict[Hashable, float] = field(default_factory=dict)
    now: float = 0.0

    def served_so_far(self, session: Hashable) -> float:
        return max(self.served.get(session, 0.0), self.now)

    def advance(self, waiting: set[Hashable]) -> None:
        """Set the time to what the least served of the `waiting` sessions has had, and forget sessions that are behind.

        Sessions of other blocks count as well, and those that want nothing now do not. Otherwise the clock would run
        away from those that wait, or be held up by one that needs little.
        """
        self.now = min(map(self.served_so_far, waiting), default=max(self.served.values(), default=self.now))
        ahead = {session: served for session, served in self.served.items() if served > self.now}
        inactive = [session for session in ahead if session not in waiting]
        for session in heapq.nsmallest(len(inactive) - MAX_REMEMBERED_SESSIONS, inactive, key=ahead.__getitem__):
            del ahead[session]
        self.served = ahead


def next_batch(waiting: Sequence[QueuedTokens], shares: FairShares, budget: int) -> list[TokenSlice]:
    """The next iteration: all in one pass, and at most `budget` tokens unless it is one request that is
    computed whole. Empty only if nothing waits."""
    candidates = _training_or_inference(waiting)
    if not candidates:
        return []
    yielding = _yielding(candidates)
    first = [request for request in candidates if request.number not in yielding]
    oldest = max(first, key=lambda request: (_effective_age(request), -request.number))
    together = [one for one in candidates if may_share_pass(oldest.span, oldest.joins_parts, one.span, one.joins_parts)]
    queue = sorted(together, key=lambda request: (request.number in yielding, _sort_key(request, shares)))
    if queue[0].whole:
        return [TokenSlice(queue[0].number, queue[0].tokens)]
    queue = [request for request in queue if not request.whole]
    last = [request for request in queue if request.number in yielding]
    short = [request for request in queue if request.short and request.number not in yielding]
    long = [request for request in queue if not request.short]
    # The oldest request decides which blocks compute, so it has to get something.
    least = 0 if oldest.short else 1
    kept = min(max(least, int(budget * LONG_BUDGET_SHARE)), sum(request.tokens for request in long))
    batch = _fill_budget(short, budget - kept)
    batch += _fill_budget(long, budget - sum(part.tokens for part in batch))
    tokens = sum(part.tokens for part in batch)
    return batch + _fill_budget(last, min(tokens // TOKENS_PER_YIELDING, budget - tokens))


def may_share_pass(span: Span, joins_parts: bool, other: Span, other_joins: bool) -> bool:
    """Whether a request for the blocks `other` may go into a pass over `span`; for `joins_parts` see `QueuedTokens`."""
    return span == other or (joins_parts and other_joins and span.start <= other.start and other.end <= span.end)


def _yielding(candidates: Sequence[QueuedTokens]) -> set[int]:
    """Numbers of the requests that let others go first."""
    if not any(request.short and request.urgent for request in candidates):
        return set()
    return {one.number for one in candidates if one.short and not one.urgent and one.waited < MAX_YIELD_S}


def _sort_key(request: QueuedTokens, shares: FairShares) -> tuple[bool, float, int]:
    age = _effective_age(request)
    has_priority = age >= PRIORITY_AFTER_S
    behind = shares.served(request) + request.token_cost / request.weight  # where it stands after one more token
    return not has_priority, -age if has_priority else behind, request.number


def _effective_age(request: QueuedTokens) -> float:
    """Seconds that count as the request's waiting time."""
    return (request.waited if request.waited >= OVERDUE_AFTER_S else request.idle) * request.weight


def _training_or_inference(waiting: Sequence[QueuedTokens]) -> list[QueuedTokens]:
    """Inference, or training where there is no inference or training has waited long enough."""
    inference = [request for request in waiting if not request.training]
    training = [request for request in waiting if request.training]
    has_priority = any(request.idle >= TRAINING_PRIORITY_AFTER_S for request in training)
    return training if has_priority or not inference else inference


def _fill_budget(queue: Sequence[QueuedTokens], budget: int) -> list[TokenSlice]:
    """Tokens for the requests of a queue, in order: at most `budget` in all, and for each peer its part by weight.

    What peers leave of their parts is distributed again, so that no budget is left while a request waits.
    """
    given = dict.fromkeys((request.number for request in queue), 0)
    unserved = [request for request in queue if request.tokens]
    while budget > 0 and unserved:
        weights: dict[str, float] = {}
        for request in unserved:
            weights[request.peer] = max(request.weight, weights.get(request.peer, 0.0))
        part = budget / sum(weights.values())
        left = {peer: max(1, int(part * weight)) for peer, weight in weights.items()}
        for request in unserved:
            tokens = min(request.tokens - given[request.number], left[request.peer], budget)
            given[request.number] += tokens
            left[request.peer] -= tokens
            budget -= tokens
        unserved = [request for request in unserved if given[request.number] < request.tokens]
    return [TokenSlice(number, tokens) for number, tokens in given.items() if tokens]
