"""How long to wait for a server's reply, estimated from its earlier replies.

Short steps use the estimator of TCP's retransmission timer (Jacobson and Karels; RFC 6298): a smoothed time and its
smoothed deviation. Long steps add the measured time of each further token. Beside that, the same estimator is kept for
each shape of step (tokens, to the next power of two), which says when an answer is later than usual.
"""

from __future__ import annotations

from dataclasses import dataclass

STALL_ALLOWANCE_S = 2.0
"""Seconds added to every timeout, because a healthy machine may stall for a moment."""

TIMEOUT_FACTOR = 4.0
"""How many times longer than expected a reply may take."""

FIRST_ANSWER_S = 0.1
"""A first answer that comes sooner counts as this: later ones of a healthy server may take a little longer."""

SPREAD_FACTOR = 4.0
"""Deviations from the usual time that are not worth noticing (RFC 6298)."""


@dataclass
class _UsualTime:
    """Smoothed time of the steps of one shape, and its smoothed deviation."""

    smoothed: float
    deviation: float

    def observe(self, seconds: float) -> None:
        self.deviation += (abs(seconds - self.smoothed) - self.deviation) / 4
        self.smoothed += (seconds - self.smoothed) / 8


class TimeoutEstimator:
    """Estimates the reply timeout of one server. All times are in seconds.

    Args:
        step: expected time of a step of one token, including the network.
        token: expected time of each further token.
        limit: upper limit of the timeout.
    """

    def __init__(self, step: float, token: float, limit: float) -> None:
        self._short = _UsualTime(step, step / 2)
        self._token = self._quickest_token = token
        self._limit = limit
        self._has_answered = False
        self._shapes: dict[int, _UsualTime] = {}

    def observe(self, seconds: float, tokens: int) -> None:
        """Learn from a reply: a step of `tokens` tokens took `seconds`."""
        if tokens > 1:
            measured = max(0.0, seconds - self._short.smoothed) / (tokens - 1)
            self._token += (measured - self._token) / 2
            self._quickest_token = min(self._quickest_token, seconds / tokens)
        else:
            self._observe_short(seconds)
        shape = self._shapes.get(tokens.bit_length())
        if shape is None:
            self._shapes[tokens.bit_length()] = _UsualTime(seconds, seconds / 2)
        else:
            shape.observe(seconds)

    def timeout(self, tokens: int) -> float:
        """The timeout of a step of `tokens` tokens."""
        return min(STALL_ALLOWANCE_S + self._patience(tokens), self._limit)

    def late_after(self, tokens: int) -> float:
        """After how many seconds the answer to a step of `tokens` tokens is later than such answers were.

        If none has come yet: four times what is expected, as for the timeout.
        """
        shape = self._shapes.get(tokens.bit_length())
        usual = shape.smoothed + SPREAD_FACTOR * shape.deviation if shape is not None else self._patience(tokens)
        return min(usual, self._limit)

    def refill_seconds(self, tokens: int) -> float:
        """What it takes to fill an empty cache with `tokens` tokens, at the best that was seen."""
        return min(tokens * self._quickest_token, self._limit)

    def slowness(self, seconds: float, tokens: int) -> float:
        """How many times longer than usual an answer took; 1 if there is nothing to compare with."""
        shape = self._shapes.get(tokens.bit_length())
        return seconds / shape.smoothed if shape is not None and shape.smoothed > 0 else 1.0

    def _observe_short(self, seconds: float) -> None:
        """Learn from a step of one token. What a server announced counts no longer once it has answered sooner: else
        one that announces very slow steps could answer quickly at first, and then not at all for a minute."""
        first = max(seconds, FIRST_ANSWER_S)
        if not self._has_answered and first < self._short.smoothed:
            self._short = _UsualTime(first, first / 2)
        else:
            self._short.observe(seconds)
        self._has_answered = True

    def _patience(self, tokens: int) -> float:
        expected = self._short.smoothed + SPREAD_FACTOR * self._short.deviation + max(0, tokens - 1) * self._token
        return TIMEOUT_FACTOR * expected
