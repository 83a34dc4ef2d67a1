"""An honest client that uses the swarm while it is attacked, and an event loop with nothing to do, to compare with."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.routes.events import PeerAvoided
from swarm.metrics.registry import EventLoopMetrics, Registry, encode_metrics
from tests.disturbances import demo_prompt, demo_text, greedy
from tests.server_process import prepare
from tests.swarms import FORKS, STOP_TIMEOUT, TestSwarm, run_client

PROMPTS = ("Once upon a time", "The little dog was", "One day, a girl named Lily")
TOKENS = 24


@dataclass(frozen=True)
class Text:
    """A text that the bystander has written.

    Attributes:
        is_exact: whether it is what the model writes by itself.
        seconds: from one token to the next, that of the first one from the request.
        error: why there is none; empty if there is.
    """

    is_exact: bool
    seconds: tuple[float, ...]
    error: str = ""


@dataclass(frozen=True)
class Avoided:
    """The bystander keeps a server out of its routes."""

    peer_id: str
    reason: str


@dataclass
class Bystander:
    """The process, and what it has told so far."""

    connection: Connection
    texts: list[Text] = field(default_factory=list)
    avoided: list[Avoided] = field(default_factory=list)

    def listen(self) -> None:
        """Take what it has told since the last time. Raises `EOFError` if it has died."""
        while self.connection.poll():
            told = self.connection.recv()
            (self.texts if isinstance(told, Text) else self.avoided).append(told)

    @property
    def token_seconds(self) -> list[float]:
        """Of all tokens, ascending."""
        return sorted(second for text in self.texts for second in text.seconds)


@contextmanager
def run_bystander(swarm: TestSwarm, log: Path) -> Iterator[Bystander]:
    """A client that writes texts until the end of the context. It has written one before."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_write_texts, args=(swarm.model, swarm.bootstraps, swarm.folder, log, theirs))
    process.start()
    theirs.close()
    bystander = Bystander(ours)
    try:
        first = ours.recv()
        assert isinstance(first, Text), first
        assert first.is_exact, first
        yield bystander
    finally:
        with suppress(OSError):
            ours.send("stop")
        _end(process)
        with suppress(EOFError, OSError):
            bystander.listen()
        ours.close()


def _write_texts(model: str, bootstraps: Sequence[str], folder: str, log: Path, connection: Connection) -> None:
    prepare(folder, log)
    swarm = TestSwarm(model, folder)
    swarm.bootstraps = tuple(bootstraps)
    prompts = [demo_prompt(text) for text in PROMPTS]
    expected = [demo_text(prompt, TOKENS) for prompt in prompts]

    def on_event(event: object) -> None:
        if isinstance(event, PeerAvoided):
            connection.send(Avoided(event.peer_id, event.reason))

    with run_client(swarm) as client:
        client.swarm.add_listener(on_event)
        for prompt, right in itertools.cycle(zip(prompts, expected, strict=True)):
            if connection.poll():
                return
            connection.send(_write_text(client, prompt, right))


def _write_text(client: Any, prompt: torch.Tensor, right: list[int]) -> Text:
    clock = _Clock()
    try:
        written = greedy(client, prompt, TOKENS, stopping_criteria=StoppingCriteriaList([clock]))
    except Exception as error:  # whatever it is, it is what the campaign looks for
        return Text(False, tuple(clock.seconds), repr(error))
    return Text(written == right, tuple(clock.seconds))


class _Clock(StoppingCriteria):
    """Notes how long each token took, and stops nothing."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass(frozen=True)
class IdleLoop:
    """A process whose event loop does nothing but measure its own lag, which is the machine's then."""

    connection: Connection

    def read(self) -> str:
        """Its metrics now."""
        self.connection.send("read")
        return str(self.connection.recv())


@contextmanager
def run_idle_loop(folder: str) -> Iterator[IdleLoop]:
    """An idle loop, until the end of the context."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_idle, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        yield IdleLoop(ours)
    finally:
        with suppress(OSError):
            ours.send("stop")
        _end(process)
        ours.close()


def _idle(folder: str, connection: Connection) -> None:
    prepare(folder)
    uvloop.run(_measure(connection))


async def _measure(connection: Connection) -> None:
    registry = Registry()
    measuring = asyncio.create_task(EventLoopMetrics(registry).run())
    with suppress(EOFError, OSError):
        while await asyncio.to_thread(connection.recv) == "read":
            connection.send(encode_metrics(registry)[0].decode())
    measuring.cancel()


def _end(process: Any) -> None:
    process.join(STOP_TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
