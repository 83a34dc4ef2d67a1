"""How long to wait for a server's answer: from what its answers took so far, never from a constant of minutes.

Short steps follow the estimator of TCP's retransmission timer (Jacobson and Karels; RFC 6298): a smoothed time and its
smoothed deviation. Long steps add what their tokens cost.
"""

from __future__ import annotations

STALL_ALLOWANCE_S = 2.0
"""Seconds that any machine may stall now and then without being dead."""

TIMEOUT_FACTOR = 4.0
"""How many times longer than expected an answer may take."""


class TimeoutEstimator:
    """What is known about the answers of one server. All times in seconds.

    Args:
        step: expected time of a step of one token, travel included.
        token: expected time of each further token.
        limit: no wait is longer.
    """

    def __init__(self, step: float, token: float, limit: float) -> None:
        self._smoothed = step
        self._deviation = step / 2
        self._token = token
        self._limit = limit

    def answered(self, seconds: float, tokens: int) -> None:
        """A step of so many tokens was answered after so many seconds."""
        if tokens > 1:
            measured = max(0.0, seconds - self._smoothed) / (tokens - 1)
            self._token += (measured - self._token) / 2
        else:
            self._deviation += (abs(seconds - self._smoothed) - self._deviation) / 4
            self._smoothed += (seconds - self._smoothed) / 8

    def allowed(self, tokens: int) -> float:
        """How long to wait for a step of so many tokens."""
        expected = self._smoothed + TIMEOUT_FACTOR * self._deviation + max(0, tokens - 1) * self._token
        return min(STALL_ALLOWANCE_S + TIMEOUT_FACTOR * expected, self._limit)
