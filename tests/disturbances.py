"""Texts that are written while something happens to the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.session import InferenceSession
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.swarms import ServerProcess, TestSwarm

Event = Callable[[InferenceSession], object]


class Before(StoppingCriteria):
    """Lets things happen between two tokens: `events[k]` when k - 1 tokens are written and the step that gives token k
    has not begun.

    Attributes:
        times: when each token was written, by `time.perf_counter`, the events behind it not yet begun.
    """

    def __init__(self, session: InferenceSession, events: Mapping[int, Event]) -> None:
        self.session = session
        self.events = events
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.happen(len(self.times) + 1)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def happen(self, token: int) -> None:
        if token in self.events:
            self.events[token](self.session)


def write(
    model: Any, prompt: torch.Tensor, new: int, events: Mapping[int, Event] | None = None, **more: Any
) -> list[int]:
    """The next `new` tokens, greedily, in a session of their own. `events[1]` happens between the opening of the
    session and the prefill; see `Before` for the others."""
    with model.inference_session(max_length=prompt.shape[1] + new) as session:
        session.open()
        before = Before(session, events or {})
        before.happen(1)
        return greedy(model, prompt, new, stopping_criteria=StoppingCriteriaList([before]), **more)


def greedy(model: Any, prompt: torch.Tensor, new: int, **more: Any) -> list[int]:
    """The next `new` tokens, also beyond the end of a text."""
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False, **more
    )
    return written[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def holder(swarm: TestSwarm, session: InferenceSession, block: int) -> ServerProcess:
    """The server that computes the block for this session."""
    assert session.route is not None
    return swarm.server(next(hop.server.peer_id for hop in session.route.hops if block in hop.span))


@contextmanager
def dripping(server: ServerProcess, seconds: float = 2.0) -> Iterator[None]:
    """Let a server answer, but each step only after about `seconds`."""
    over = threading.Event()

    def drip() -> None:
        while not over.is_set():
            server.freeze()
            over.wait(seconds)
            server.thaw()
            over.wait(0.03)  # time for a step, if one has come

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def demo_prompt(text: str = "Once upon a time") -> torch.Tensor:
    """Token ids `[1, tokens]` for the demo model."""
    return load_tokenizer(DEMO_FOLDER)(text, return_tensors="pt").input_ids  # type: ignore[no-any-return]


def demo_text(prompt: torch.Tensor, new: int) -> list[int]:
    """What the demo model writes, computed in this process by transformers alone; once, where tests ask again."""
    key = tuple(prompt.flatten().tolist())
    if len(_texts.get(key, ())) < new:
        _texts[key] = greedy(load_local_model(DEMO_FOLDER), prompt, new)
    return _texts[key][:new]


_texts: dict[tuple[int, ...], list[int]] = {}
"""By prompt, the longest text that was asked for: shorter ones are its beginnings."""
