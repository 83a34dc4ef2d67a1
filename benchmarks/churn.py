"""A swarm under churn: servers are killed and started all the time while clients write texts that are known beforehand.

Everything is a process of its own: each server, each client, and the libp2p daemon of each. All of them are ended by
their process ids at the end, whatever happens.
"""

from __future__ import annotations

import gc
import random
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.auto_model import AutoDistributedModelForCausalLM
from swarm.client.session import InferenceSession
from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.tokenizer import load_local_model, load_tokenizer
from swarm.server.placement.initial_blocks import weakest_window
from swarm.transport.p2p import quiet_hivemind
from tests.swarms import FORKS, ServerProcess, TestSwarm, is_running, run_swarm

BLOCKS = 12
SPANS = ("0:4", "4:8", "8:12") * 2
LENGTHS = (3, 4, 5, 6)
"""Blocks that a newcomer may hold, so that spans get cut in all ways."""

MAX_STARTING = 3
"""Servers that may be on their way at a time. The next kill waits where more are: on a machine that is busy with other
things a start takes longer than the time between two kills, and a swarm whose last server is gone cannot be joined."""

POLL_PERIOD_S = 0.2
"""How often an overdue kill is tried again."""

MEMORY_EVERY = 10.0
CLIENT_TIMEOUT = 300.0
"""Seconds that a client gets to end its last text."""

PROMPTS = (
    "Once upon a time",
    "The little dog",
    "Tom and his sister went to the",
    "One day a bird found",
    "It was raining, and Lily",
    "In the garden there lived",
    "Mother said that",
    "The king was very",
)


@dataclass(frozen=True)
class Text:
    """A prompt `[1, tokens]` and what the model alone writes after it, greedily."""

    prompt: torch.Tensor
    tokens: list[int]


@dataclass
class Written:
    """One text as a client got it. Times are those of `time.monotonic`, which all processes share.

    Attributes:
        client: number of the client.
        right: every token is the model's own.
        tokens: how many.
        opening: seconds until the session had a route.
        gaps: seconds between one token and the next.
        failovers: (when, gap) of the tokens during which the route changed.
        trouble: the exception that reached the client.
    """

    client: int
    right: bool = False
    tokens: int = 0
    opening: float = 0.0
    gaps: list[float] = field(default_factory=list)
    failovers: list[tuple[float, float]] = field(default_factory=list)
    trouble: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes that a peer has for itself, and its libp2p daemon's."""

    when: float
    own: int
    daemon: int


@dataclass
class Churn:
    """What happened. Times as in `Written`."""

    began: float
    written: list[Written] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    gaps: int = 0
    """Kills after which nobody held some blocks."""
    clients: dict[int, list[Memory]] = field(default_factory=dict)
    servers: dict[int, list[Memory]] = field(default_factory=dict)
    """By process id."""
    ended: float = 0.0
    survivors: list[int] = field(default_factory=list)
    """Process ids of ours that are still there when all is over."""


def make_texts(new: int = 96) -> list[Text]:
    """Let the model alone write its texts."""
    model, tokenizer = load_local_model(DEMO_FOLDER), load_tokenizer(DEMO_FOLDER)
    prompts = [tokenizer(words, return_tensors="pt").input_ids for words in PROMPTS]
    return [Text(prompt, _generate(model, prompt, new)) for prompt in prompts]


def run_churn(
    seconds: float, clients: int, every: float, seed: int, texts: Sequence[Text], min_kills: int = 0
) -> Churn:
    """Clients write for `seconds`, while every `every` seconds a random server is killed and another one started.

    They go on beyond `seconds` until `min_kills` servers were killed and every client has written a text.
    """
    with (
        run_swarm(DEMO_FOLDER, SPANS, dtype="float32") as swarm,
        _run_clients(swarm, clients, texts, seed) as connections,
    ):
        churn = Churn(time.monotonic())
        director = _Director(swarm, connections, churn, random.Random(seed))
        director.run(seconds, every, min_kills)
        pids = director.pids()
        churn.ended = time.monotonic()
        director.finish()
    churn.survivors = [pid for pid in pids if is_running(pid)]
    return churn


class _Director:
    """Kills, starts, listens to the clients, and looks at their memory."""

    def __init__(self, swarm: TestSwarm, clients: dict[Connection, Any], churn: Churn, chance: random.Random) -> None:
        self._swarm = swarm
        self._clients = clients
        self._churn = churn
        self._chance = chance
        self._coming: list[ServerProcess] = []
        self._pids: set[int] = set()

    def run(self, seconds: float, every: float, min_kills: int) -> None:
        now = time.monotonic()
        end, next_kill, next_look = now + seconds, now + every, now
        while now < end or not self._has_seen_enough(min_kills):
            if now >= next_kill and len(self._coming) < MAX_STARTING:
                self._kill_one()
                next_kill = max(next_kill + every, now)
            if now >= next_look:
                self._look()
                next_look += MEMORY_EVERY
            events = [next_look, max(next_kill, now + POLL_PERIOD_S), *([end] if now < end else [])]
            self._listen(min(events) - time.monotonic())
            now = time.monotonic()
        self._look()

    def _has_seen_enough(self, min_kills: int) -> bool:
        wrote = {written.client for written in self._churn.written}
        return len(self._churn.kills) >= min_kills and len(wrote) >= len(self._clients)

    def finish(self) -> None:
        """Let every client end its text. Raises `TimeoutError` if one does not."""
        for connection in self._clients:
            connection.send("stop")
        deadline = time.monotonic() + CLIENT_TIMEOUT
        while self._clients:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._clients)} clients did not end in {CLIENT_TIMEOUT:.0f} s")
            self._listen(1.0)
        for server in self._coming:
            server.wait_ready()

    def pids(self) -> set[int]:
        """Processes that were seen at any time, and those of the servers."""
        return self._pids | {server.pid for server in self._swarm.servers}

    def _kill_one(self) -> None:
        victim = self._chance.choice(self._swarm.working())
        victim.kill()
        self._churn.kills.append(time.monotonic())
        self._churn.gaps += min(self._holders(self._swarm.working())) == 0
        # The newcomer goes where it is needed most, counting those who are on their way.
        span = weakest_window(self._holders([*self._swarm.working(), *self._coming]), self._chance.choice(LENGTHS))
        self._coming.append(self._swarm.start(str(span), dtype="float32"))

    def _holders(self, servers: Sequence[ServerProcess]) -> list[float]:
        """How many of these servers hold each block."""
        spans = [Span(*map(int, server.blocks.split(":"))) for server in servers]
        return [float(sum(block in span for span in spans)) for block in range(BLOCKS)]

    def _listen(self, seconds: float) -> None:
        """Take in what clients and newcomers say in the next `seconds` seconds, at most one message each."""
        coming = {server.connection: server for server in self._coming}
        for ready in wait([*self._clients, *coming], max(0.0, seconds)):
            if ready in coming:
                self._coming.remove(coming[ready].wait_ready())
                continue
            try:
                message = ready.recv()
            except EOFError:
                message = Written(-1, trouble="a client's process has ended")
            if isinstance(message, Written):
                self._churn.written.append(message)
            if message is None or message.client < 0:
                del self._clients[ready]

    def _look(self) -> None:
        for number, process in enumerate(self._clients.values()):
            self._note(self._churn.clients.setdefault(number, []), process.pid)
        for server in self._swarm.working():
            self._note(self._churn.servers.setdefault(server.pid, []), server.pid)

    def _note(self, memory: list[Memory], pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            children = process.children()
            daemon = sum(child.memory_info().rss for child in children)
            memory.append(Memory(time.monotonic(), process.memory_full_info().uss, daemon))
            self._pids |= {pid, *(child.pid for child in children)}


@contextmanager
def _run_clients(swarm: TestSwarm, count: int, texts: Sequence[Text], seed: int) -> Iterator[dict[Connection, Any]]:
    """Processes that write until they are told to stop, by their connections."""
    clients: dict[Connection, Any] = {}
    processes = []
    try:
        for number in range(count):
            ours, theirs = FORKS.Pipe()
            arguments = (theirs, number, swarm.addresses, swarm.folder, texts, seed)
            process = FORKS.Process(target=_client, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            clients[ours] = process
        yield clients
    finally:
        for process in processes:
            if not clients:  # all have said that they are done
                process.join(CLIENT_TIMEOUT)
            process.kill()
            process.join()


def _client(
    connection: Connection, number: int, addresses: tuple[str, ...], folder: str, texts: Sequence[Text], seed: int
) -> None:
    """What a client's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = folder
    gc.freeze()  # else the first full collection makes copies of what this process shares with all other forks
    torch.set_num_threads(1)
    quiet_hivemind()
    chance = random.Random(f"{seed} {number}")
    model = AutoDistributedModelForCausalLM.from_pretrained(
        DEMO_FOLDER, initial_peers=addresses, wire="none", dtype="float32"
    )
    while not connection.poll():
        connection.send(_write(model, chance.choice(texts), number))
    model.swarm.close()
    connection.send(None)


def _write(model: Any, text: Text, number: int) -> Written:
    written = Written(number)
    try:
        began = time.monotonic()
        length = text.prompt.shape[1] + len(text.tokens)
        with model.inference_session(max_length=length) as session:
            session.open()
            written.opening = time.monotonic() - began
            watch = StoppingCriteriaList([_Watch(session, written)])
            written.right = _generate(model, text.prompt, len(text.tokens), stopping_criteria=watch) == text.tokens
    except BaseException:
        written.trouble = traceback.format_exc()
    return written


class _Watch(StoppingCriteria):
    """Notes how long each token took, and whether servers were replaced meanwhile."""

    def __init__(self, session: InferenceSession, written: Written) -> None:
        self._session = session
        self._written = written
        self._route = session.route
        self._last = time.monotonic()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self._written.gaps.append(gap)
        self._written.tokens += 1
        if self._session.route != self._route:
            self._route = self._session.route
            self._written.failovers.append((now, gap))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _generate(model: Any, prompt: torch.Tensor, new: int, **more: Any) -> list[int]:
    mask = torch.ones_like(prompt)
    written = model.generate(
        prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **more
    )
    tokens: list[int] = written[0, prompt.shape[1] :].tolist()
    return tokens


def growth(memory: Sequence[Memory]) -> tuple[float, float]:
    """Bytes at the beginning and at the end of a peer's life: medians of its first and its last quarter.

    The first look is left out: the peer was not warm then.
    """
    looks = [look.own for look in memory[1:]] or [look.own for look in memory]
    quarter = max(1, len(looks) // 4)
    return statistics.median(looks[:quarter]), statistics.median(looks[-quarter:])
