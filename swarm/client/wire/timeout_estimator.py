"""How long to wait for a server's reply, estimated from its earlier replies.

Short steps use the estimator of TCP's retransmission timer (Jacobson and Karels; RFC 6298): a smoothed time and its
smoothed deviation. Long steps add the measured time of each further token.
"""

from __future__ import annotations

STALL_ALLOWANCE_S = 2.0
"""Seconds added to every timeout, because a healthy machine may stall for a moment."""

TIMEOUT_FACTOR = 4.0
"""How many times longer than expected a reply may take."""


class TimeoutEstimator:
    """Estimates the reply timeout of one server. All times are in seconds.

    Args:
        step: expected time of a step of one token, including the network.
        token: expected time of each further token.
        limit: upper limit of the timeout.
    """

    def __init__(self, step: float, token: float, limit: float) -> None:
        self._smoothed = step
        self._deviation = step / 2
        self._token = token
        self._limit = limit

    def observe(self, seconds: float, tokens: int) -> None:
        """Learn from a reply: a step of `tokens` tokens took `seconds`."""
        if tokens > 1:
            measured = max(0.0, seconds - self._smoothed) / (tokens - 1)
            self._token += (measured - self._token) / 2
        else:
            self._deviation += (abs(seconds - self._smoothed) - self._deviation) / 4
            self._smoothed += (seconds - self._smoothed) / 8

    def timeout(self, tokens: int) -> float:
        """The timeout of a step of `tokens` tokens."""
        expected = self._smoothed + TIMEOUT_FACTOR * self._deviation + max(0, tokens - 1) * self._token
        return min(STALL_ALLOWANCE_S + TIMEOUT_FACTOR * expected, self._limit)
