"""One sequence being generated: a thread that runs transformers' `generate`, and what the event loop hears of it.

Laws:
- The sequences of a model share its baton (`compute_lock`): one computes its head and samples while the
  others wait for the swarm. So many requests are lanes of one pipeline, and servers batch their steps.
- A sequence has a session of its own. When nobody wants it any more, `cancel` ends its wait for the swarm, wherever
  it is, and the session is freed on all servers.
- The thread never waits for whoever reads: what it makes is bounded by `max_tokens` and kept until it is read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import torch

from swarm.client.routes.events import SessionEvent
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket
from swarm.gateway.failures import ApiFailure, failure_of
from swarm.generation.sampling import Chosen, Constraint, Sampler, Sampling, TextPieces
from swarm.generation.stop_sequences import Stops
from swarm.generation.tool_calls import ToolCall, ToolParser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What to generate.

    Attributes:
        prompt: token ids.
        max_tokens: new ones at most.
        sampling: how they are chosen.
        stops: texts at which to end.
        constraint: what the text must be.
        tools: reads calls out of the text; None if there are no tools.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stops: Sequence[str] = ()
    constraint: Constraint | None = None
    tools: ToolParser | None = None


@dataclass(frozen=True)
class Delta:
    """What came: text, calls, and the tokens since the last delta that was told."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class End:
    """The sequence is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        tokens: how many were generated.
    """

    reason: str
    tokens: int


@dataclass(frozen=True)
class Failed:
    """The sequence cannot be completed."""

    failure: ApiFailure


News = Delta | End | Failed | SessionEvent


class Generation:
    """Generates `work` in a thread of its own, from `start` on.

    Args:
        model: the distributed model.
        tokenizer: its own.
        baton: what the model's generations share.
        ends: tokens with which an answer ends.
        work: see `Work`.
        hear: called in the event loop with what happens, in order; `End` or `Failed` comes last.

    Attributes:
        tokens: generated so far.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        baton: ComputeLock,
        ends: Collection[int],
        work: Work,
        hear: Callable[[News], None],
    ) -> None:
        self.tokens = 0
        self._hear = hear
        self._model = model
        self._work = work
        self._turn = ComputeTicket(baton)
        self._cancelled = False
        self._ends = ends
        self._text = _Text(TextPieces(tokenizer, work.prompt, keep_special=work.tools is not None), work)
        self._thread = threading.Thread(target=self._run, name="swarm-generation", daemon=True)

    def start(self) -> None:
        """Begin. For the event loop that hears of it."""
        self._loop = asyncio.get_running_loop()
        self._started = time.perf_counter()
        self._ended = asyncio.Event()
        self._thread.start()

    def cancel(self) -> None:
        """Nobody wants it any more. Comes back at once; the session is freed a moment later."""
        self._cancelled = True
        self._turn.end()

    async def ended(self) -> None:
        """Wait until the session is freed."""
        await self._ended.wait()

    def _run(self) -> None:
        outcome: News
        try:
            outcome = End(self._generate(), self.tokens)
        except CancelledError:
            outcome = Failed(failure_of(RuntimeError("cancelled")))
        except BaseException as error:
            outcome = Failed(failure_of(error))
            if outcome.failure.status == 500:
                logger.exception("a generation failed")
            else:
                logger.warning("a generation ended: %s", error)
        self._tell(outcome)
        self._in_loop(self._ended.set)

    def _generate(self) -> str:
        """Run `generate`; why it came to its end."""
        work = self._work
        room = len(work.prompt) + work.max_tokens
        session = self._model.inference_session(max_length=room, listener=self._tell)
        sampler = Sampler(work.sampling, work.constraint, self._chosen)
        try:
            with self._turn:
                self._model.generate(
                    torch.tensor([list(work.prompt)]),
                    attention_mask=torch.ones(1, len(work.prompt), dtype=torch.long),
                    session=session,
                    max_new_tokens=work.max_tokens,
                    do_sample=False,  # the sampler leaves one token to choose from
                    num_beams=1,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    logits_processor=[sampler],
                    stopping_criteria=[self._stopping],
                )
        finally:
            session.close()  # outside the turn, which may have been ended
        last = self._text.end()
        if last.text or last.calls or last.tokens:
            self._tell(last)
        if self._text.called:
            return "tool_calls"
        return "stop" if self._text.stopped or self._last in self._ends else "length"

    def _chosen(self, chosen: Chosen) -> None:
        if self._cancelled:
            raise CancelledError
        self.tokens += 1
        self._last = chosen.token
        delta = self._text.add(chosen, is_end=chosen.token in self._ends)
        if delta is not None:
            self._tell(delta)

    def _stopping(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """transformers' hook: whether each row has come to its end."""
        return torch.full((input_ids.shape[0],), self._text.stopped, device=input_ids.device)

    def _tell(self, news: News) -> None:
        self._in_loop(self._hear, news)

    def _in_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop has been closed: the gateway has ended
            logger.debug("nobody hears the end of a generation")


class _Text:
    """From tokens to what is told: whole characters, up to a stop, calls of tools apart.

    Attributes:
        stopped: a stop sequence came.
        called: a tool was called.
    """

    def __init__(self, pieces: TextPieces, work: Work) -> None:
        self.stopped = False
        self.called = False
        self._pieces = pieces
        self._stops = Stops(work.stops)
        self._tools = work.tools
        self._tells_tokens = work.sampling.top_logprobs is not None
        self._tokens: list[Chosen] = []

    def add(self, chosen: Chosen, is_end: bool) -> Delta | None:
        """The next token; what can be told now."""
        if self._tells_tokens and not is_end:
            self._tokens.append(chosen)
        text = self._stops.feed("" if is_end else self._pieces.add(chosen.token))
        self.stopped = self._stops.hit
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.feed(text)
        return self._delta(text, calls) if text or calls else None

    def end(self) -> Delta:
        """What was held back."""
        text = "" if self.stopped else self._stops.feed(self._pieces.end()) + self._stops.end()
        self.stopped = self._stops.hit
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            rest, more = self._tools.end()
            text, calls = text + rest, calls + more
        return self._delta(text, calls)

    def _delta(self, text: str, calls: list[ToolCall]) -> Delta:
        self.called = self.called or bool(calls)
        tokens, self._tokens = tuple(self._tokens), []
        return Delta(text, tuple(calls), tokens)
