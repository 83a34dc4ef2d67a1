"""How long to wait for a server's reply, estimated from its earlier replies.

For each shape of step (its tokens, to the next power of two) this is the estimator of TCP's retransmission timer
(Jacobson and Karels; RFC 6298): a smoothed time and its smoothed deviation. A deadline allows much more, and goes by
steps of one token and the measured time of each further token.
"""

from __future__ import annotations

STALL_ALLOWANCE_S = 2.0
"""Seconds added to every timeout, because a healthy machine may stall for a moment."""

TIMEOUT_FACTOR = 4.0
"""How many times longer than expected a reply may take."""

SPREAD_FACTOR = 4.0
"""Deviations from the usual time that are not worth noticing (RFC 6298)."""


class TimeoutEstimator:
    """Estimates the reply timeout of one server. All times are in seconds.

    What the server announced counts until its first reply: else one that announces very slow steps could answer quickly
    at first, and then not at all for a minute.

    Args:
        step: expected time of a step of one token, including the network.
        token: expected time of each further token.
        limit: upper limit of the timeout.
    """

    def __init__(self, step: float, token: float, limit: float) -> None:
        self._announced = step, step / 2
        self._token = self._quickest_token = token
        self._limit = limit
        self._usual: dict[int, tuple[float, float]] = {}
        """Smoothed time and deviation of the steps of each shape."""

    def observe(self, seconds: float, tokens: int) -> float:
        """Learn from a reply: a step of `tokens` tokens took `seconds`.

        Returns:
            how many times longer than usual that is; 1 if there is nothing to compare with.
        """
        if tokens > 1:
            short, _ = self._usual.get(1, self._announced)
            self._token += (max(0.0, seconds - short) / (tokens - 1) - self._token) / 2
            self._quickest_token = min(self._quickest_token, seconds / tokens)
        shape = tokens.bit_length()
        usual = self._usual.get(shape)
        if usual is None:
            self._usual[shape] = seconds, seconds / 2
            return 1.0
        smoothed, deviation = usual
        off = seconds - smoothed
        self._usual[shape] = smoothed + off / 8, deviation + (abs(off) - deviation) / 4
        return seconds / smoothed if smoothed > 0 else 1.0

    def timeout(self, tokens: int) -> float:
        """The timeout of a step of `tokens` tokens."""
        smoothed, deviation = self._usual.get(1, self._announced)
        expected = smoothed + SPREAD_FACTOR * deviation + max(0, tokens - 1) * self._token
        return min(STALL_ALLOWANCE_S + TIMEOUT_FACTOR * expected, self._limit)

    def late_after(self, tokens: int) -> float:
        """After how many seconds the answer to a step of `tokens` tokens is later than such answers were.

        If none has come yet: four times what is expected, as for the timeout.
        """
        usual = self._usual.get(tokens.bit_length())
        if usual is None:
            return max(0.0, self.timeout(tokens) - STALL_ALLOWANCE_S)
        return min(usual[0] + SPREAD_FACTOR * usual[1], self._limit)

    def refill_seconds(self, tokens: int) -> float:
        """What it takes to fill an empty cache with `tokens` tokens, at the best that was seen."""
        return min(tokens * self._quickest_token, self._limit)
