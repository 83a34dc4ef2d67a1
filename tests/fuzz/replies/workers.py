"""Processes in which games with hostile servers are played: one for those in memory, one for those over libp2p.

Games in memory move the clock of their process; and what a client leaves behind can only be counted where nobody else
opens anything.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.fuzz.replies.hostile_streams import Mischief
from tests.fuzz.replies.in_memory import play
from tests.fuzz.replies.over_libp2p import HostileTable
from tests.server_process import prepare
from tests.swarms import FORKS

MIN_MESSAGES = 60
"""Games are played until a batch has so many messages."""

POLL_S = 0.5
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Batch:
    """What came of one batch.

    Attributes:
        messages: that hostile servers sent, or withheld.
        lies: of each kind.
        violation: what must not have happened, with a traceback; empty if nothing did.
        longest_s: the longest call of the client; virtual seconds in memory.
    """

    messages: int = 0
    lies: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    longest_s: float = 0.0


class Player(Protocol):
    """Plays games."""

    mischief: Mischief

    def play(self, chance: random.Random) -> float:
        """One game; the seconds of its longest call."""

    def close(self) -> None:
        """Give everything back, and look whether anything has grown."""


class InMemory:
    """Games on virtual time, with a tiny model."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(zoo.make_checkpoint("llama", folder / "tiny"))
        self._model = load_span(checkpoint, Span(0, zoo.BLOCKS), dtype=torch.float32, device=torch.device("cpu"))
        self.mischief = Mischief()

    def play(self, chance: random.Random) -> float:
        return play(self._model, chance.getrandbits(64), self.mischief).longest_s

    def close(self) -> None:
        pass


class OverLibp2p:
    """Games in the swarm that is attacked."""

    def __init__(self, model: Path, addresses: Sequence[str], spans: Sequence[str], folder: Path) -> None:
        self._table = HostileTable(model, addresses, spans, folder)
        self.mischief = self._table.mischief

    def play(self, chance: random.Random) -> float:
        return self._table.play(chance)

    def close(self) -> None:
        self._table.close()


class Worker:
    """A process in which games are played.

    Args:
        make: makes the player there.
        folder: for its temporary files.
    """

    def __init__(self, make: Callable[[], Player], folder: Path) -> None:
        self._connection, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_work, args=(make, str(folder), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._unread = 1
        """What it has yet to say; more than one thing if somebody did not wait for the first."""

    async def ready(self) -> None:
        """Wait until it can play. What kept it from that is raised."""
        await self._receive()

    async def play(self, seed: int) -> Batch:
        """Play a batch of games."""
        self._send(seed)
        return await self._receive()

    async def close(self) -> Batch:
        """What it has to say in the end."""
        self._send(None)
        try:
            return await self._receive()
        finally:
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
            if self._process.is_alive():
                self._process.kill()
            self._connection.close()

    def _send(self, seed: int | None) -> None:
        self._connection.send(seed)
        self._unread += 1

    async def _receive(self) -> Batch:
        """The last thing that it has to say."""
        batch = Batch()
        while self._unread:
            while not await asyncio.to_thread(self._connection.poll, POLL_S):
                pass
            found = self._connection.recv()
            self._unread -= 1
            if isinstance(found, BaseException):
                raise found
            batch = found
        return batch


def in_memory(folder: Path) -> Worker:
    """A worker for games in memory."""
    return Worker(partial(InMemory, folder), folder)


def over_libp2p(model: Path, addresses: Sequence[str], spans: Sequence[str], folder: Path) -> Worker:
    """A worker for games in a swarm."""
    return Worker(partial(OverLibp2p, model, tuple(addresses), tuple(spans), folder), folder)


def _work(make: Callable[[], Any], folder: str, connection: Connection) -> None:
    prepare(folder)
    try:
        player: Player = make()
    except Exception as error:
        connection.send(error)
        return
    connection.send(Batch())
    while (seed := connection.recv()) is not None:
        connection.send(_play(player, seed))
    connection.send(_judged(player.close))


def _play(player: Player, seed: int) -> Batch:
    chance, mischief = random.Random(seed), player.mischief
    sent, lies = mischief.sent, mischief.lies.copy()
    longest_s = 0.0

    def games() -> None:
        nonlocal longest_s
        while mischief.sent < sent + MIN_MESSAGES:
            longest_s = max(longest_s, player.play(chance))

    judged = _judged(games)
    return Batch(mischief.sent - sent, mischief.lies - lies, judged.violation, longest_s)


def _judged(work: Callable[[], object]) -> Batch:
    try:
        work()
    except Exception:
        return Batch(violation=traceback.format_exc())
    return Batch()
