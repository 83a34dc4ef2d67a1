"""A swarm under churn: servers are killed and started continuously while clients generate texts with known results.

Each server, each client, and each libp2p daemon is a process of its own. All of them are ended by process id at the
end, whatever happens.
"""

from __future__ import annotations

import gc
import random
import statistics
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

from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.session import InferenceSession
from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.whole_model import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.server.placement.initial_blocks import weakest_window
from tests.server_process import prepare
from tests.swarms import FORKS, ServerProcess, TestSwarm, is_running, run_swarm

BLOCKS = 12
SPANS = ("0:4", "4:8", "8:12") * 2
SPAN_LENGTHS = (3, 4, 5, 6)
"""Numbers of blocks that a new server may hold, so that spans overlap in many ways."""

MAX_STARTING = 3
"""Maximum number of servers that are starting. With more, the next kill waits: on a busy machine a start takes longer
than the time between two kills, and a swarm without servers cannot be joined."""

POLL_PERIOD_S = 0.2
"""How often an overdue kill is tried again."""

MEMORY_PERIOD_S = 10.0
CLIENT_TIMEOUT_S = 300.0
"""Time for a client to finish its last text."""

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
class KnownText:
    """A prompt `[1, tokens]` and the local model's greedy continuation."""

    prompt: torch.Tensor
    tokens: list[int]


@dataclass
class GeneratedText:
    """One text as a client received it. Times are those of `time.monotonic`, which all processes share.

    Attributes:
        client: number of the client.
        right: whether every token equals the local model's.
        tokens: number of tokens.
        opening: seconds until the session had a route.
        gaps: seconds between consecutive tokens.
        failovers: (time, gap) of the tokens during which the route changed.
        error: the traceback of the exception that reached the client; None if there was none.
    """

    client: int
    right: bool = False
    tokens: int = 0
    opening: float = 0.0
    gaps: list[float] = field(default_factory=list)
    failovers: list[tuple[float, float]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class MemorySample:
    """Unshared memory of a peer's process and resident memory of its libp2p daemon, in bytes."""

    when: float
    own: int
    daemon: int


@dataclass
class ChurnResult:
    """What happened during a run. Times are as in `GeneratedText`."""

    began: float
    written: list[GeneratedText] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    gaps: int = 0
    """Number of kills after which no server held some blocks."""
    clients: dict[int, list[MemorySample]] = field(default_factory=dict)
    servers: dict[int, list[MemorySample]] = field(default_factory=dict)
    """By process id."""
    ended: float = 0.0
    survivors: list[int] = field(default_factory=list)
    """Ids of processes that are still running at the end."""


def make_texts(new: int = 96) -> list[KnownText]:
    """Generate the expected texts with the local model."""
    model, tokenizer = load_local_model(DEMO_FOLDER), load_tokenizer(DEMO_FOLDER)
    prompts = [tokenizer(words, return_tensors="pt").input_ids for words in PROMPTS]
    return [KnownText(prompt, _generate(model, prompt, new)) for prompt in prompts]


def run_churn(
    seconds: float, clients: int, every: float, seed: int, texts: Sequence[KnownText], min_kills: int = 0
) -> ChurnResult:
    """Let clients generate for `seconds`, while a random server is replaced every `every` seconds.

    The run continues beyond `seconds` until `min_kills` servers were killed and every client has generated a text.
    """
    with (
        run_swarm(DEMO_FOLDER, SPANS, dtype="float32") as swarm,
        _run_clients(swarm, clients, texts, seed) as connections,
    ):
        churn = ChurnResult(time.monotonic())
        driver = _ChurnDriver(swarm, connections, churn, random.Random(seed))
        driver.run(seconds, every, min_kills)
        pids = driver.pids()
        churn.ended = time.monotonic()
        driver.finish()
    churn.survivors = [pid for pid in pids if is_running(pid)]
    return churn


class _ChurnDriver:
    """Kills and starts servers, receives the clients' results, and samples memory."""

    def __init__(
        self, swarm: TestSwarm, clients: dict[Connection, Any], churn: ChurnResult, chance: random.Random
    ) -> None:
        self._swarm = swarm
        self._clients = clients
        self._churn = churn
        self._chance = chance
        self._starting: list[ServerProcess] = []
        self._pids: set[int] = set()

    def run(self, seconds: float, every: float, min_kills: int) -> None:
        now = time.monotonic()
        end, next_kill, next_look = now + seconds, now + every, now
        while now < end or not self._has_seen_enough(min_kills):
            if now >= next_kill and len(self._starting) < MAX_STARTING:
                self._kill_one()
                next_kill = max(next_kill + every, now)
            if now >= next_look:
                self._sample_memory()
                next_look += MEMORY_PERIOD_S
            events = [next_look, max(next_kill, now + POLL_PERIOD_S), *([end] if now < end else [])]
            self._listen(min(events) - time.monotonic())
            now = time.monotonic()
        self._sample_memory()

    def _has_seen_enough(self, min_kills: int) -> bool:
        wrote = {written.client for written in self._churn.written}
        return len(self._churn.kills) >= min_kills and len(wrote) >= len(self._clients)

    def finish(self) -> None:
        """Let every client finish its text. Raises `TimeoutError` if one does not."""
        for connection in self._clients:
            connection.send("stop")
        deadline = time.monotonic() + CLIENT_TIMEOUT_S
        while self._clients:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._clients)} clients did not end in {CLIENT_TIMEOUT_S:.0f} s")
            self._listen(1.0)
        for server in self._starting:
            server.wait_ready()

    def pids(self) -> set[int]:
        """Ids of all processes that were seen at any time, and of the servers."""
        return self._pids | {server.pid for server in self._swarm.servers}

    def _kill_one(self) -> None:
        victim = self._chance.choice(self._swarm.working())
        victim.kill()
        self._churn.kills.append(time.monotonic())
        self._churn.gaps += min(self._holders(self._swarm.working())) == 0
        # The new server goes where it is needed most, taking starting servers into account.
        span = weakest_window(
            self._holders([*self._swarm.working(), *self._starting]), self._chance.choice(SPAN_LENGTHS)
        )
        self._starting.append(self._swarm.start(str(span), dtype="float32"))

    def _holders(self, servers: Sequence[ServerProcess]) -> list[float]:
        """How many of these servers hold each block."""
        spans = [Span(*map(int, server.blocks.split(":"))) for server in servers]
        return [float(sum(block in span for span in spans)) for block in range(BLOCKS)]

    def _listen(self, seconds: float) -> None:
        """Receive messages of clients and new servers for `seconds` seconds, at most one each."""
        starting = {server.connection: server for server in self._starting}
        for ready in wait([*self._clients, *starting], max(0.0, seconds)):
            if ready in starting:
                self._starting.remove(starting[ready].wait_ready())
                continue
            try:
                message = ready.recv()
            except EOFError:
                message = GeneratedText(-1, error="a client's process has ended")
            if isinstance(message, GeneratedText):
                self._churn.written.append(message)
            if message is None or message.client < 0:
                del self._clients[ready]

    def _sample_memory(self) -> None:
        for number, process in enumerate(self._clients.values()):
            self._sample_process(self._churn.clients.setdefault(number, []), process.pid)
        for server in self._swarm.working():
            self._sample_process(self._churn.servers.setdefault(server.pid, []), server.pid)

    def _sample_process(self, memory: list[MemorySample], pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            children = process.children()
            daemon = sum(child.memory_info().rss for child in children)
            memory.append(MemorySample(time.monotonic(), process.memory_full_info().uss, daemon))
            self._pids |= {pid, *(child.pid for child in children)}


@contextmanager
def _run_clients(
    swarm: TestSwarm, count: int, texts: Sequence[KnownText], seed: int
) -> Iterator[dict[Connection, Any]]:
    """Run client processes that generate until they are told to stop; yields connection -> process."""
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
            if not clients:  # all clients have finished
                process.join(CLIENT_TIMEOUT_S)
            process.kill()
            process.join()


def _client(
    connection: Connection, number: int, addresses: tuple[str, ...], folder: str, texts: Sequence[KnownText], seed: int
) -> None:
    """The main function of a client's process."""
    prepare(folder)
    gc.freeze()  # otherwise the first full collection copies the memory that this process shares with all other forks
    chance = random.Random(f"{seed} {number}")
    model = AutoDistributedModelForCausalLM.from_pretrained(
        DEMO_FOLDER, initial_peers=addresses, wire="none", dtype="float32"
    )
    while not connection.poll():
        connection.send(_write(model, chance.choice(texts), number))
    model.swarm.close()
    connection.send(None)


def _write(model: Any, text: KnownText, number: int) -> GeneratedText:
    written = GeneratedText(number)
    try:
        began = time.monotonic()
        length = text.prompt.shape[1] + len(text.tokens)
        with model.inference_session(max_length=length) as session:
            session.open()
            written.opening = time.monotonic() - began
            watch = StoppingCriteriaList([_TokenTimer(session, written)])
            written.right = _generate(model, text.prompt, len(text.tokens), stopping_criteria=watch) == text.tokens
    except Exception:  # whatever reaches a client is a finding, and the report has to show it
        written.error = traceback.format_exc()
    return written


class _TokenTimer(StoppingCriteria):
    """Records how long each token took, and whether servers were replaced during it."""

    def __init__(self, session: InferenceSession, written: GeneratedText) -> None:
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


def growth(memory: Sequence[MemorySample]) -> tuple[float, float]:
    """Bytes at the beginning and at the end of a peer's life: medians of its first and its last quarter.

    The first sample is left out because the peer was not warmed up.
    """
    looks = [look.own for look in memory[1:]] or [look.own for look in memory]
    quarter = max(1, len(looks) // 4)
    return statistics.median(looks[:quarter]), statistics.median(looks[-quarter:])
