"""Token buckets: what each of many keys may still use, where use up to a burst is free and refills with time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")


class TokenBuckets(Generic[K]):
    """A bucket per key, full at first. Pure: all times are seconds of one clock, passed in by the caller.

    Args:
        burst: tokens in a full bucket.
        refill_per_s: tokens that come back each second.
        max_keys: buckets that are remembered; the one that nothing was taken from for longest is forgotten first.
    """

    def __init__(self, burst: float, refill_per_s: float, max_keys: int) -> None:
        self._burst = burst
        self._refill_per_s = refill_per_s
        self._max_keys = max_keys
        self._buckets: OrderedDict[K, tuple[float, float]] = OrderedDict()
        """What was left, and when."""

    def __len__(self) -> int:
        """The number of buckets that are remembered."""
        return len(self._buckets)

    def left(self, key: K, now: float) -> float:
        """The tokens in a bucket; below zero if more was taken than there was."""
        left, when = self._buckets.get(key, (self._burst, now))
        return min(self._burst, left + max(0.0, now - when) * self._refill_per_s)

    def take(self, key: K, amount: float, now: float) -> None:
        """Take tokens out, more than there are if need be. To take 0 only keeps the bucket from being forgotten."""
        self._buckets[key] = (self.left(key, now) - amount, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)


class RateLimit:
    """A rate for all together, with a burst to begin with. Pure, as `TokenBuckets`.

    Args:
        per_s: how much may be used each second.
        burst: what may be used at once after a rest.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._bucket = TokenBuckets[None](burst, per_s, 1)

    def delay(self, amount: float, now: float) -> float:
        """Use so much; after how many seconds that is allowed, at once if it is not above 0."""
        self._bucket.take(None, amount, now)
        return -self._bucket.left(None, now) / self._per_s
