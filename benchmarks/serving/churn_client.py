"""Clients of a swarm under churn: processes that generate texts whose tokens are known, and report each of them."""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.routes.events import PeerAvoided, SessionEvent
from swarm.client.session import InferenceSession
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.routing.peer_health import PeerFailure
from tests.server_process import prepare
from tests.swarms import FORKS, TestSwarm

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


@dataclass(frozen=True)
class Ban:
    """A client leaves a server out of its routes, which it takes to have failed. Time as in `GeneratedText`."""

    when: float
    peer_id: str
    reason: PeerFailure


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
        bans: of servers, since the text before.
        error: the traceback of the exception that reached the client; None if there was none.
    """

    client: int
    right: bool = False
    tokens: int = 0
    opening: float = 0.0
    gaps: list[float] = field(default_factory=list)
    failovers: list[tuple[float, float]] = field(default_factory=list)
    bans: list[Ban] = field(default_factory=list)
    error: str | None = None


def make_texts(new: int = 96) -> list[KnownText]:
    """Generate the expected texts with the local model."""
    model, tokenizer = load_local_model(DEMO_FOLDER), load_tokenizer(DEMO_FOLDER)
    prompts = [tokenizer(words, return_tensors="pt").input_ids for words in PROMPTS]
    return [KnownText(prompt, _generate(model, prompt, new)) for prompt in prompts]


@contextmanager
def run_clients(swarm: TestSwarm, count: int, texts: Sequence[KnownText], seed: int) -> Iterator[dict[Connection, Any]]:
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
    bans: deque[Ban] = deque()
    model.swarm.add_listener(lambda event: _note_ban(bans, event))
    while not connection.poll():
        written = _write(model, chance.choice(texts), number)
        written.bans = [bans.popleft() for _ in range(len(bans))]
        connection.send(written)
    model.swarm.close()
    connection.send(None)


def _note_ban(bans: deque[Ban], event: SessionEvent) -> None:
    """Keep a ban that takes the server to have failed, not only to be full or about to leave."""
    if isinstance(event, PeerAvoided) and (reason := PeerFailure(event.reason)).counts_as_strike:
        bans.append(Ban(time.monotonic(), event.peer_id, reason))


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
