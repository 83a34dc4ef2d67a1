"""Generates one sequence: a thread runs transformers' `generate`, and the event loop receives what happens.

Laws:
- The sequences of a model share its compute lock: one computes its head and samples while the others wait for the
  swarm. So many requests are lanes of one pipeline, and servers batch their steps.
- Each sequence has its own inference session. `cancel` ends its wait for the swarm at any point, and the session is
  then freed on all servers.
- The thread never waits for the reader: its output is bounded by its limit and is kept until it is read.
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

from swarm.client.routes.events import ExitTaken, ExitVerified, SessionEvent
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.errors import NoExitClassifiers, ProcessorsWithState, SwarmError, UsageError
from swarm.generation.detokenizer import IncrementalDetokenizer
from swarm.generation.errors import EXPECTED_ERRORS, GenerationCancelled, GenerationCrashed, InvalidGenerationRequest
from swarm.generation.exit_counts import ExitCounts
from swarm.generation.prompt_scores import prompt_scores
from swarm.generation.provisional_text import ProvisionalText
from swarm.generation.sampling import Sampler
from swarm.generation.sequence_output import SequenceDelta, SequenceOutput
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel

logger = logging.getLogger(__name__)


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
        self._last_token: int | None = None
        self._end_tokens = served.end_tokens.union(request.end_tokens)
        has_markers = request.tools is not None or request.thinking is not None  # which may be special tokens
        detokenizer = IncrementalDetokenizer(served.tokenizer, request.prompt, keep_special=has_markers)
        self._output = SequenceOutput(detokenizer, request)
        self._sampler = Sampler(request)
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
        max_length = len(request.prompt) + request.limit
        session = self._served.model.inference_session(max_length=max_length, listener=self._on_session_event)
        try:
            with self._ticket:
                if request.scores_prompt:
                    self._score_prompt(session)
                if request.limit:
                    self._generate_in(session)
        except UsageError as error:
            if request.early_exit is None or type(error) not in (UsageError, ProcessorsWithState):
                raise  # not about its options
            raise InvalidGenerationRequest(str(error), parameter="early_exit") from error
        finally:
            session.close()  # outside of the ticket, which may have been cancelled
        last = self._output.finish()
        if last.text or last.calls or last.tokens or last.thought:
            self._emit(last)
        if self._output.has_calls and not self._output.is_cut:
            return "tool_calls"
        return "stop" if self._output.stopped or self._last_token in self._end_tokens else "length"

    def _score_prompt(self, session: InferenceSession) -> None:
        if self._request.early_exit is not None:
            session.prepare_for(self._request.early_exit)  # not possible once it has computed tokens
        count = self._request.top_logprobs or 0
        scored = prompt_scores(
            self._served.model, session, self._request.prompt, count, before_portion=self._require_running
        )
        self._emit(SequenceDelta("", prompt=scored))

    def _require_running(self) -> None:
        if self._cancelled:
            raise CancelledError

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
            max_new_tokens=request.limit,
            do_sample=False,  # the sampler leaves one token to choose from
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            logits_processor=[self._sampler],
            stopping_criteria=[self._stopping_criterion],
            streamer=streamer if request.provisional else None,
            **self._model_settings(),
        )
        try:
            generate(early_exit=request.early_exit)
        except (NoExitClassifiers, ProcessorsWithState) as error:
            if isinstance(error, ProcessorsWithState) and request.is_exit_asked:
                raise
            self._served.warn_once(f"No token leaves early: {error}")
            generate(early_exit=None)  # goes on behind the prompt, if that is computed

    def _model_settings(self) -> dict[str, Any]:
        """What the request sets of the model's own generation settings."""
        settings: dict[str, Any] = {}
        if self._request.end_tokens:
            settings["eos_token_id"] = sorted(self._end_tokens)
        if self._request.repetition_penalty is not None:
            settings["repetition_penalty"] = self._request.repetition_penalty
        return settings

    def _stopping_criterion(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """transformers' hook: whether the sequence is complete with the token that now stands at its end."""
        self._require_running()
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
