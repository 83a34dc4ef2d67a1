"""Replies and refusals of hostile servers in every state of a client: in memory, and over libp2p."""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

from tests.fuzz.kinds import Kind, Violation
from tests.fuzz.replies.workers import Worker, in_memory, over_libp2p
from tests.fuzz.targets import Targets


class Replies(Kind):
    """A real client asks servers that lie to it; honest ones hold the same blocks."""

    name: ClassVar[str] = "replies"
    share: ClassVar[int] = 15

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[Worker] = []

    async def open(self, targets: Targets) -> None:
        spans = [f"{server.start}:{server.end}" for server in targets.servers]
        folders = [targets.folder / name for name in ("in-memory", "over-libp2p")]
        for folder in folders:
            folder.mkdir()
        self._workers = [
            in_memory(folders[0]),
            over_libp2p(targets.model_folder, targets.bootstrap_addresses, spans, folders[1]),
        ]
        await asyncio.gather(*(worker.ready() for worker in self._workers))

    async def send(self, random: random.Random) -> int:
        seed = random.getrandbits(64)
        batches = await asyncio.gather(*(worker.play(seed) for worker in self._workers))
        for batch in batches:
            self.outcomes.update(batch.lies)
            if batch.violation:
                raise Violation(batch.violation)
        return sum(batch.messages for batch in batches)

    async def close(self) -> None:
        workers, self._workers = self._workers, []
        ended = await asyncio.gather(*(worker.close() for worker in workers))
        for batch in ended:
            if batch.violation:
                raise Violation(batch.violation)
