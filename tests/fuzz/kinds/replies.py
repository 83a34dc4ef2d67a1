"""Replies and refusals of hostile servers in every state of a client.

The games are played in a process of their own, because they move its clock.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.fuzz.kinds import Kind, Violation
from tests.fuzz.replies.hostile_streams import Mischief
from tests.fuzz.replies.in_memory import play, tiny_model
from tests.fuzz.targets import Targets
from tests.server_process import prepare
from tests.swarms import FORKS

MIN_MESSAGES = 120
"""Games are played until a batch has so many messages."""


@dataclass(frozen=True)
class Batch:
    """What came of one batch.

    Attributes:
        messages: that hostile servers sent, or withheld.
        lies: of each kind.
        violation: what must not have happened, with a traceback; empty if nothing did.
    """

    messages: int
    lies: Counter[str]
    violation: str


class Replies(Kind):
    """A real client asks servers that lie to it; honest ones hold the same blocks."""

    name: ClassVar[str] = "replies"
    share: ClassVar[int] = 15

    def __init__(self) -> None:
        super().__init__()
        self._pool: ProcessPoolExecutor | None = None

    async def open(self, targets: Targets) -> None:
        folder = targets.folder / "replies"
        folder.mkdir()
        self._pool = ProcessPoolExecutor(1, FORKS, _prepare, (folder,))

    async def send(self, random: random.Random) -> int:
        seed = random.getrandbits(64)
        batch = await asyncio.get_running_loop().run_in_executor(self._pool, _play, seed)
        self.outcomes.update(batch.lies)
        if batch.violation:
            raise Violation(batch.violation)
        return batch.messages

    async def close(self) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)


_models: list[Any] = []
"""That of the process in which games are played."""


def _prepare(folder: Path) -> None:
    prepare(str(folder))
    _models.append(tiny_model(folder))


def _play(seed: int) -> Batch:
    chance, mischief, violation = random.Random(seed), Mischief(), ""
    try:
        while mischief.sent < MIN_MESSAGES:
            play(_models[0], chance.getrandbits(64), mischief)
    except Exception:
        violation = traceback.format_exc()
    return Batch(mischief.sent, mischief.lies, violation)
