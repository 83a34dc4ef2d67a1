"""Whether a guess is worth sending, from what earlier ones were worth. Pure.

A guess is verified by the servers like any token, and costs them the same. It is worth that if the tokens that it
yields are more than its cost in time would yield otherwise: its chance to stand, times one token, against what it
costs, times the tokens per second that the text makes now. So over slow links, where a text makes few tokens a second
however fast the servers are, guesses of little hope are sent; where servers are the limit, hardly any.

How likely a guess stands is the draft's own probability, corrected by how guesses of such probability fared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.data_structures import HopTiming

KEPT = 0.97
"""Weight of the past, for each new observation: about 33 count."""

PRIOR = 2.0
"""Observations as which the draft's own probability counts at first."""

EDGES = (0.15, 0.3, 0.45, 0.6, 0.72, 0.82, 0.9, 0.95, 0.985)
"""Bounds between the classes of probabilities whose guesses are counted together."""

MIN_CHANCE, MAX_CHANCE = 0.01, 0.9
"""A guess with less chance is never sent, and one with more always."""

INSTANT_S = 0.0005
"""A draft that needs less for a guess is asked before the token in front is sent, so that both go in one step."""

KEPT_PACE = 0.95
"""Weight of the past in the measured pace, for each token."""

MEASURED = {True: 12, False: 6}
"""Tokens for which a way of generating is kept at least: with guesses, and without."""

FIRST_PAUSE, LAST_PAUSE = 128, 1024
"""Tokens without guesses where these make a text slower; the pause doubles each time."""

TRIED_EVERY = 32
"""Where guessing does not pay, one token in so many has a guess, to see whether that has changed."""


STALL = 4.0
"""A token counts as that many times the usual at most, so that a link's standstill says little about guessing."""


class Acceptance:
    """How often the guesses of one draft stand.

    Args:
        before: of the same draft in an earlier text, from which this one begins; None to believe the draft.
    """

    def __init__(self, before: Acceptance | None = None) -> None:
        shares = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        if before is not None:
            shares = [stood / seen for stood, seen in zip(before._stood, before._seen, strict=True)]
        self._stood: list[float] = [PRIOR * share for share in shares]
        self._seen: list[float] = [PRIOR] * len(shares)
        self._all_stood = PRIOR * (1.0 if before is None else before.mean)
        self._all_seen = PRIOR

    def on_verified(self, probability: float, stands: bool) -> None:
        """A guess was verified, behind tokens that all stood."""
        place = bisect_right(EDGES, probability)
        self._stood[place] = KEPT * self._stood[place] + stands
        self._seen[place] = KEPT * self._seen[place] + 1
        self._all_stood = KEPT * self._all_stood + stands
        self._all_seen = KEPT * self._all_seen + 1

    def chance(self, probability: float) -> float:
        """That a guess of this probability stands, if all before it do."""
        place = bisect_right(EDGES, probability)
        return self._stood[place] / self._seen[place]

    @property
    def mean(self) -> float:
        """That any guess stands."""
        return self._all_stood / self._all_seen


class Pace:
    """Whether guessing makes a text faster at all, as measured: what it costs others, or a busy machine, shows here.

    While tokens come faster than one could go through the servers, it does. If not, some tokens go without guesses, and
    the faster way is kept; where that is the one without, guessing is tried again now and then.

    Attributes:
        guesses: whether to guess now.
        fastest_s: of a single token's way through the servers; None before the first.
    """

    def __init__(self) -> None:
        self.guesses = True
        self.fastest_s: float | None = None
        self._guessing, self._plain = _TokenTime(), _TokenTime()
        self._left = MEASURED[True]
        self._pause = FIRST_PAUSE
        self._pauses = False

    def on_round(self, seconds: float) -> None:
        """A token that went off alone was answered after this time."""
        self.fastest_s = seconds if self.fastest_s is None else min(seconds, 1.003 * self.fastest_s)

    def on_tokens(self, count: int, seconds: float, guessing: bool) -> None:
        """So many tokens have come to stand in this time, with guesses or without."""
        usual_s = max(self.fastest_s or 0, self._guessing.seconds or 0, self._plain.seconds or 0)
        (self._guessing if guessing else self._plain).add(count, min(seconds / count, STALL * usual_s or math.inf))
        self._left -= count
        if self._left <= 0:
            self._choose()

    def _choose(self) -> None:
        plain_s, guessing_s = self._plain.seconds or self.fastest_s, self._guessing.seconds
        if self.guesses:
            if plain_s is None or guessing_s is None or guessing_s <= plain_s:
                return
            self.guesses, self._left, self._plain = False, MEASURED[False], _TokenTime()
        elif self._pauses or (plain_s is not None and guessing_s is not None and guessing_s < plain_s):
            if self._pauses:
                self._guessing = _TokenTime()
            self.guesses, self._left, self._pauses = True, MEASURED[True], False
        else:
            self._pauses, self._left, self._pause = True, self._pause, min(2 * self._pause, LAST_PAUSE)


@dataclass
class _TokenTime:
    """Seconds for a token, on average: the mean of all at first, later more of the newest."""

    seconds: float | None = None
    tokens: int = 0

    def add(self, count: int, seconds: float) -> None:
        """So many tokens have taken this long, each."""
        kept = min(KEPT_PACE**count, self.tokens / (self.tokens + count))
        self.seconds, self.tokens = averaged(self.seconds, seconds, kept), self.tokens + count


class GuessPolicy:
    """Decides about the guesses of one text.

    Args:
        acceptance: of each draft.
        overhead: what a step costs a server beside its tokens, in tokens. A guess counts as one token more: steps that
            servers have no time for are not sent one by one.
    """

    def __init__(self, acceptance: Sequence[Acceptance], overhead: float) -> None:
        self.acceptance = acceptance
        self._overhead = overhead
        self.pace = Pace()
        self._tokens = self._seconds = self._waited = 0.0
        self._server_s: float | None = None
        self._step_s: float | None = None
        self._client_s: float | None = None
        self._asked_s: list[float | None] = [None] * len(acceptance)
        self._without = 0

    def on_asked(self, draft: int, seconds: float, guesses: int) -> None:
        """A draft has taken this long for so many guesses."""
        self._asked_s[draft] = averaged(self._asked_s[draft], seconds / max(1, guesses), KEPT)

    def is_instant(self, draft: int) -> bool:
        """Whether a draft's guesses take no time that matters."""
        seconds = self._asked_s[draft]
        return seconds is not None and seconds < INSTANT_S

    def on_prompt(self, tokens: int, timings: Sequence[HopTiming]) -> None:
        """The prompt has so many tokens, and has gone through the servers: what to expect of the first token."""
        self.on_answer(tokens, timings)
        share = (self._overhead + 1) / (self._overhead + tokens)
        expected_s = sum(max(0.0, one.total - one.compute) + share * one.compute for one in timings)
        self.on_tokens(1, expected_s, expected_s)
        self._step_s = None  # that was no step of a token

    def on_tokens(self, count: int, seconds: float, waited: float) -> None:
        """This many tokens have come to stand, in this time, of which the client has waited so long."""
        kept = KEPT**count
        self._tokens = kept * self._tokens + count
        self._seconds = kept * self._seconds + seconds
        self._waited = kept * self._waited + waited

    def on_answer(self, tokens: int, timings: Sequence[HopTiming]) -> None:
        """Servers have computed a step of so many tokens. A guess costs all for whom they compute the same time."""
        self._step_s = averaged(self._step_s, max((one.compute for one in timings), default=0.0), KEPT)
        shared_s = max((one.compute * one.sessions for one in timings), default=0.0)
        self._server_s = averaged(self._server_s, shared_s / (self._overhead + tokens), KEPT)

    def on_proposed(self, seconds: float, tokens: int) -> None:
        """Making and sending so many guesses has taken this long."""
        self._client_s = averaged(self._client_s, seconds / tokens, KEPT)

    @property
    def least_chance(self) -> float:
        """What a guess has to have in order to be sent."""
        if not self._seconds:
            return MIN_CHANCE
        busy = 1 - self._waited / self._seconds  # while the client would only wait, its time costs nothing
        cost_s = max(self._server_s or 0.0, busy * (self._client_s or 0.0))
        return min(max(MIN_CHANCE, cost_s * self._tokens / self._seconds), MAX_CHANCE)

    @property
    def useful_steps(self) -> float:
        """How many steps fit into the way of one: further ones would only wait for the slowest server.

        Guesses that are kept back meanwhile go together, which costs servers less.
        """
        round_s = self.pace.fastest_s
        return max(1, round(round_s / self._step_s)) if round_s and self._step_s else math.inf

    def may_try(self) -> bool:
        """Whether a guess without hope is sent all the same. Asked once for each token that stands without one."""
        self._without = (self._without + 1) % TRIED_EVERY
        return self._without == 0


def averaged(before: float | None, value: float, kept: float) -> float:
    """A moving average; None before the first value."""
    return value if before is None else kept * before + (1 - kept) * value
