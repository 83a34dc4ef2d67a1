"""Generates one sequence: a thread runs transformers' `generate`, and the event loop receives what happens.

Laws:
- The sequences of a model share its compute lock: one computes its head and samples while the others wait for the
  swarm. So many requests are lanes of one pipeline, and servers batch their steps.
- Each sequence has its own inference session. `cancel` ends its wait for the swarm at any point, and the session is
  then freed on all servers.
- The thread never waits for the reader: its output is bounded by `max_tokens` and is kept until it is read.
- Only tokens that stand become output: transformers asks the stopping criterion behind each of them, whether tokens
  may leave early or not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from swarm.client.early_exit.options import EarlyExit
from swarm.client.routes.events import ExitTaken, ExitVerified, SessionEvent
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.errors import NoExitClassifiers, ProcessorsWithState, SwarmError, UsageError
from swarm.generation.detokenizer import IncrementalDetokenizer
from swarm.generation.errors import EXPECTED_ERRORS, GenerationCancelled, GenerationCrashed, InvalidGenerationRequest
from swarm.generation.exit_counts import ExitCounts
from swarm.generation.formats.tool_calls import ToolCall, ToolCallParser
from swarm.generation.provisional_text import ProvisionalText
from swarm.generation.sampling import SampledToken, Sampler, SamplingOptions, TokenConstraint
from swarm.generation.served_model import ServedModel
from swarm.generation.stop_sequences import StopSequenceFilter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate.

    Attributes:
        prompt: token ids.
        max_tokens: limit on the new tokens.
        sampling: how tokens are chosen.
        stops: texts at which the sequence ends.
        constraint: the form that the text must have; None for any.
        tools: parses tool calls in the text; None if there are no tools.
        early_exit: when tokens leave before the last block; None for never.
        is_exit_asked: whether the request asks for that itself, rather than having it by default.
        provisional: whether the text of tokens that left is shown before they are verified.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingOptions
    stops: Sequence[str] = ()
    constraint: TokenConstraint | None = None
    tools: ToolCallParser | None = None
    early_exit: EarlyExit | None = None
    is_exit_asked: bool = False
    provisional: bool = False


@dataclass(frozen=True)
class SequenceDelta:
    """New output: text, tool calls, and the tokens since the last delta."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True)
class SequenceProvisional:
    """What may follow the output so far, and may be taken back. The next delta or provisional text replaces it."""

    text: str


@dataclass(frozen=True)
class SequenceEnd:
    """The sequence is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        tokens: how many were generated.
    """

    reason: str
    tokens: int


@dataclass(frozen=True)
class SequenceFailed:
    """The sequence cannot be completed."""

    error: SwarmError


SequenceEvent = SequenceDelta | SequenceProvisional | SequenceEnd | SequenceFailed | SessionEvent


class SequenceGeneration:
    """Generates one sequence in a thread of its own, from `start` on.

    Args:
        served: the model.
        request: what to generate.
        on_event: called in the event loop for each event, in order; `SequenceEnd` or `SequenceFailed` comes last.

    Attributes:
        tokens: number of tokens generated so far.
        exits: those that left early.
    """

    def __init__(
        self, served: ServedModel, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]
    ) -> None:
        self.tokens = 0
        self.exits = ExitCounts()
        self._on_event = on_event
        self._served = served
        self._request = request
        self._ticket = ComputeTicket(served.compute_lock)
        self._cancelled = False
        self._end_tokens = served.end_tokens
        detokenizer = IncrementalDetokenizer(served.tokenizer, request.prompt, keep_special=request.tools is not None)
        self._output = _SequenceOutput(detokenizer, request)
        self._sampler = Sampler(request.sampling, len(request.prompt), request.constraint)
        self._thread = threading.Thread(target=self._run, name="swarm-generation", daemon=True)

    def start(self) -> None:
        """Start generating. Events go to the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()

    def cancel(self) -> None:
        """Stop generating. Returns at once; the session is freed a moment later."""
        self._cancelled = True
        self._ticket.cancel()

    async def wait_ended(self) -> None:
        """Wait until the session is freed."""
        await self._ended.wait()

    def _run(self) -> None:
        outcome: SequenceEvent
        try:
            outcome = SequenceEnd(self._generate(), self.tokens)
        except CancelledError:
            outcome = SequenceFailed(GenerationCancelled("the generation was cancelled"))
        except EXPECTED_ERRORS as error:
            logger.warning("A generation ended: %s", error)
            outcome = SequenceFailed(error)
        except Exception:  # whatever it is, the request has to end
            logger.exception("A generation failed")
            outcome = SequenceFailed(GenerationCrashed("the generation failed; the log has the details"))
        self._emit(outcome)
        self._call_in_loop(self._ended.set)

    def _generate(self) -> str:
        """Run `generate`, and return the finish reason."""
        request = self._request
        max_length = len(request.prompt) + request.max_tokens
        session = self._served.model.inference_session(max_length=max_length, listener=self._on_session_event)
        try:
            with self._ticket:
                self._generate_in(session)
        except UsageError as error:
            if request.early_exit is None or type(error) not in (UsageError, ProcessorsWithState):
                raise  # not about its options
            raise InvalidGenerationRequest(str(error), parameter="early_exit") from error
        finally:
            session.close()  # outside of the ticket, which may have been cancelled
        last = self._output.finish()
        if last.text or last.calls or last.tokens:
            self._emit(last)
        if self._output.has_calls:
            return "tool_calls"
        return "stop" if self._output.stopped or self._last_token in self._end_tokens else "length"

    def _generate_in(self, session: InferenceSession) -> None:
        """Run `generate`. Early exit is optional: where the route has no place for it, no token leaves.

        Nor does one where early exit is a default that the model's own settings rule out.
        """
        request = self._request
        streamer = ProvisionalText(self._preview, lambda text: self._emit(SequenceProvisional(text)))
        generate = partial(
            self._served.model.generate,
            torch.tensor([list(request.prompt)]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            session=session,
            max_new_tokens=request.max_tokens,
            do_sample=False,  # the sampler leaves one token to choose from
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            logits_processor=[self._sampler],
            stopping_criteria=[self._stopping_criterion],
            streamer=streamer if request.provisional else None,
        )
        try:
            generate(early_exit=request.early_exit)
        except (NoExitClassifiers, ProcessorsWithState) as error:
            if isinstance(error, ProcessorsWithState) and request.is_exit_asked:
                raise
            self._served.warn_once(f"No token leaves early: {error}")
            generate(early_exit=None)  # goes on behind the prompt, if that is computed

    def _stopping_criterion(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """transformers' hook: whether the sequence is complete with the token that now stands at its end."""
        if self._cancelled:
            raise CancelledError
        if not self._output.stopped:
            self._add_token(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), self._output.stopped, device=input_ids.device)

    def _add_token(self, token: int) -> None:
        self._last_token = token
        sampled = self._sampler.sampled(token, self.tokens)
        self.tokens += 1
        delta = self._output.add_token(sampled, is_end=token in self._end_tokens)
        if delta is not None:
            self._emit(delta)

    def _preview(self, tokens: Sequence[int]) -> str:
        return self._output.preview(list(takewhile(lambda token: token not in self._end_tokens, tokens)))

    def _on_session_event(self, event: SessionEvent) -> None:
        if isinstance(event, ExitTaken | ExitVerified):
            self.exits.count(event)  # up to two a token: not worth an event each
        else:
            self._emit(event)

    def _emit(self, event: SequenceEvent) -> None:
        self._call_in_loop(self._on_event, event)

    def _call_in_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: the process is ending
            logger.debug("a generation ended after its event loop")


class _SequenceOutput:
    """Turns tokens into deltas: whole characters, up to a stop sequence, with tool calls separated.

    Attributes:
        stopped: a stop sequence has occurred.
        has_calls: a tool was called.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, request: SequenceRequest) -> None:
        self.stopped = False
        self.has_calls = False
        self._detokenizer = detokenizer
        self._stop_filter = StopSequenceFilter(request.stops)
        self._tools = request.tools
        self._keeps_tokens = request.sampling.top_logprobs is not None
        self._tokens: list[SampledToken] = []

    def add_token(self, sampled: SampledToken, is_end: bool) -> SequenceDelta | None:
        """Add the next token, and return the output that is now certain; None if there is none."""
        if self._keeps_tokens and not is_end:
            self._tokens.append(sampled)
        text = self._stop_filter.feed("" if is_end else self._detokenizer.add_token(sampled.token))
        self.stopped = self._stop_filter.hit
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.feed(text)
        return self._delta(text, calls) if text or calls else None

    def preview(self, tokens: Sequence[int]) -> str:
        """The text that these tokens would add; none where it may become a tool call."""
        return self._stop_filter.preview(self._detokenizer.preview(tokens)) if self._tools is None and tokens else ""

    def finish(self) -> SequenceDelta:
        """The output that was held back."""
        text = "" if self.stopped else self._stop_filter.feed(self._detokenizer.finish()) + self._stop_filter.finish()
        self.stopped = self._stop_filter.hit
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            rest, more = self._tools.finish()
            text, calls = text + rest, calls + more
        return self._delta(text, calls)

    def _delta(self, text: str, calls: list[ToolCall]) -> SequenceDelta:
        self.has_calls = self.has_calls or bool(calls)
        tokens, self._tokens = tuple(self._tokens), []
        return SequenceDelta(text, tuple(calls), tokens)
