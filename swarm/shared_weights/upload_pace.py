"""How fast a holder sends: no faster than it was told to, and slowly while it computes for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.common.token_buckets import TokenBuckets
from swarm.shared_weights.manifest import CHUNK_BYTES

BUSY_BYTES_PER_S = 8 << 20
"""While clients wait for what this machine computes. Sending takes processor time, too."""

_ALL = "all"


class UploadPace:
    """Bounds the bytes that are sent to all peers together.

    Args:
        now: seconds of a monotonic clock.
        bytes_per_s: None for no bound.
        is_busy: whether clients wait for what this machine computes.
    """

    def __init__(
        self,
        now: Callable[[], float],
        bytes_per_s: float | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._now, self._is_busy = now, is_busy
        self._always = _Limit(bytes_per_s) if bytes_per_s is not None else None
        self._while_busy = _Limit(BUSY_BYTES_PER_S)

    async def wait(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        now = self._now()
        delay = self._always.delay(size, now) if self._always is not None else 0.0
        if self._is_busy():
            delay = max(delay, self._while_busy.delay(size, now))
        if delay > 0:
            await asyncio.sleep(delay)


class _Limit:
    """A rate for all peers together, with a chunk to begin with."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._bucket: TokenBuckets[str] = TokenBuckets(CHUNK_BYTES, bytes_per_s, 1)

    def delay(self, size: int, now: float) -> float:
        """Take `size` bytes; after how many seconds they may be sent, at once if it is not above 0."""
        self._bucket.take(_ALL, size, now)
        return -self._bucket.left(_ALL, now) / self._bytes_per_s
