"""What a key has used in the last minute, and whether one more request stays within its limits.

Laws:
- In any 60 seconds at most `requests_per_minute` requests of a key are accepted, and its requests use at most
  `tokens_per_minute`. The window slides exactly: a token bucket would let twice as much through in the minute after a
  pause. It has at most as many entries as the limit allows.
- The tokens of a request are reserved from its acceptance to its end. What it used then counts for 60 more seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from swarm.gateway.admission.api_keys import KeyLimits
from swarm.gateway.openai.api_errors import TooManyRequests

WINDOW_S = 60.0
"""Over which requests and tokens are counted."""

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
"""Bounds of the time to wait if it is not known when other requests end."""

LimitScope = Literal["key", "gateway"]


class NotAdmitted(TooManyRequests):
    """The request was not admitted.

    Attributes:
        scope: whether the key's own limits are used up, or the gateway is full.
    """

    def __init__(self, message: str, retry_after_s: float, scope: LimitScope) -> None:
        super().__init__(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.scope = scope


class SlidingWindow:
    """A sum over the last 60 seconds: an amount added at `t` counts in `[t, t + 60)`."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._sum = 0

    def sum(self, now: float) -> int:
        """What counts now."""
        while self._entries and self._entries[0][0] <= now - WINDOW_S:
            self._sum -= self._entries.popleft()[1]
        return self._sum

    def add(self, now: float, amount: int) -> None:
        """Count an amount from now on; `now` never goes back."""
        self.sum(now)  # drops old entries, which nothing else would do for a key without limits
        if amount > 0:
            self._entries.append((now, amount))
            self._sum += amount

    def seconds_until(self, now: float, amount: int) -> float:
        """Seconds until the sum is at most `amount`, if nothing is added."""
        left, until = self.sum(now), now
        for when, entry in self._entries:
            if left <= amount:
                break
            left -= entry
            until = when + WINDOW_S
        return until - now


@dataclass
class KeyUsage:
    """What one key uses.

    Attributes:
        requests: accepted in the last minute.
        tokens: used in the last minute by requests that have ended.
        open: requests that run or wait.
        reserved: tokens of those.
    """

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    open: int = 0
    reserved: int = 0

    def check_limits(self, limits: KeyLimits, tokens: int, now: float) -> None:
        """Check whether the key may have one more request of this many tokens now.

        Raises:
            NotAdmitted: a limit would be exceeded.
        """
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise NotAdmitted(
                f"prompt and max_tokens are {tokens} tokens, and this key may use {limits.tokens_per_minute} a minute: "
                "ask for fewer",
                WINDOW_S,
                "key",
            )
        if limits.concurrent is not None and self.open >= limits.concurrent:
            raise NotAdmitted(
                f"this key may have {limits.concurrent} requests at once: wait until one has ended",
                MIN_RETRY_AFTER_S,
                "key",
            )
        if limits.requests_per_minute is not None and self.requests.sum(now) >= limits.requests_per_minute:
            wait_s = self.requests.seconds_until(now, limits.requests_per_minute - 1)
            raise NotAdmitted(
                f"this key may send {limits.requests_per_minute} requests a minute: "
                f"try again in {format_seconds(wait_s)}",
                wait_s,
                "key",
            )
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, tokens, now)

    def _check_tokens(self, limit: int, tokens: int, now: float) -> None:
        left = limit - self.reserved - self.tokens.sum(now)
        if tokens <= left:
            return
        # It is not known when running requests release what they have reserved.
        spare = limit - self.reserved - tokens
        wait_s = self.tokens.seconds_until(now, spare) if spare >= 0 else MAX_RETRY_AFTER_S
        raise NotAdmitted(
            f"this key may use {limit} tokens a minute and has {max(0, left)} left; this request reserves {tokens} "
            f"(prompt and max_tokens): try again in {format_seconds(wait_s)}, or ask for fewer",
            wait_s,
            "key",
        )


def format_seconds(seconds: float) -> str:
    """Whole seconds, rounded up, for messages."""
    return f"{max(1, -int(-seconds // 1))} s"
