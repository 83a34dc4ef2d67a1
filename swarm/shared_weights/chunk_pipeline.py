"""How many chunks one peer is asked for before it has sent the first of them."""

from __future__ import annotations

import time
from collections import deque

from swarm.shared_weights.holder_stream import HolderStream
from swarm.shared_weights.part_store import Chunk

MIN_WINDOW, MAX_WINDOW = 2, 8
"""Chunks that are under way from one peer: those that it sends in `WINDOW_S`, within these bounds. The lower bound
covers a round trip of 80 ms on a link of 100 Mbit/s, the upper one of 60 ms on 1 Gbit/s."""

WINDOW_S = 0.5


class ChunkPipeline:
    """The chunks that one peer was asked for, and how many these may be. Errors are those of `HolderStream`.

    Attributes:
        asked: those that have not come, in order.
        window: how many these may be now.
    """

    def __init__(self, stream: HolderStream) -> None:
        self.asked: deque[Chunk] = deque()
        self.window = MIN_WINDOW
        self._stream = stream
        self._received_at = time.monotonic()

    async def ask(self, chunk: Chunk) -> None:
        """Ask for a chunk, behind those that are under way."""
        if not self.asked:
            self._received_at = time.monotonic()
        self.asked.append(chunk)
        await self._stream.ask(chunk)

    async def receive(self) -> tuple[Chunk, bytes | memoryview]:
        """The chunk that was asked for first, and what came for it."""
        data = await self._stream.receive(self.asked[0])
        now = time.monotonic()
        self.window = next_window(self.window, now - self._received_at)
        self._received_at = now
        return self.asked.popleft(), data


def next_window(window: int, seconds: float) -> int:
    """How many chunks may be under way after one took so long; one more or fewer than before. Pure."""
    wanted = WINDOW_S / max(seconds, 1e-6)
    return min(MAX_WINDOW, window + 1) if wanted > window else max(MIN_WINDOW, window - 1)
