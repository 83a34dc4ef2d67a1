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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from swarm.client.chain.prefix import Prefix
from swarm.client.routes.events import ExitTaken, ExitVerified, GuessVerified, PromptComputed, SessionEvent
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.errors import NoExitClassifiers, ProcessorsWithState, SwarmError, UsageError
from swarm.generation.errors import EXPECTED_ERRORS, GenerationCancelled, GenerationCrashed, InvalidGenerationRequest
from swarm.generation.sampling import SampledToken, Sampler, top_tokens
from swarm.generation.sequence_output import IncrementalDetokenizer, SequenceDelta, SequenceOutput
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel


@dataclass
class _BoundaryCounts:
    """Guesses in front of one block, and how many of them stood or were given up."""

    taken: int = 0
    stood: int = 0
    given_up: int = 0


@dataclass
class ExitCounts:
    """Counts of one sequence's exits. One thread counts; others may read."""

    _boundaries: dict[int, _BoundaryCounts] = field(default_factory=dict)

    def count(self, event: ExitTaken | ExitVerified) -> None:
        """Count one event of the sequence's session."""
        counts = self._boundaries.setdefault(event.block, _BoundaryCounts())
        if isinstance(event, ExitTaken):
            counts.taken += 1
        elif event.stands:
            counts.stood += 1
        else:
            counts.given_up += 1

    @classmethod
    def total(cls, parts: Iterable[ExitCounts]) -> ExitCounts:
        """The counts of several sequences together."""
        total = cls()
        for part in parts:
            for block, counts in list(part._boundaries.items()):
                sums = total._boundaries.setdefault(block, _BoundaryCounts())
                sums.taken += counts.taken
                sums.stood += counts.stood
                sums.given_up += counts.given_up
        return total

    def details(self) -> list[dict[str, Any]]:
        """The counts as JSON, by block."""
        return [
            {"block": block, "taken": counts.taken, "stood": counts.stood, "given_up": counts.given_up}
            for block, counts in sorted(self._boundaries.items())
        ]


class ProvisionalText:
    """A streamer of one sequence (`swarm.client.early_exit.token_output`) that keeps its provisional text up to date.

    Args:
        preview: the text that these tokens would add to the output.
        show: called with the whole provisional text whenever it changes.
    """

    def __init__(self, preview: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self._preview, self._show = preview, show
        self._tokens: list[int] = []
        self._shown = ""

    def put(self, value: torch.Tensor) -> None:
        """A token stands. Output may have come with it, so what is left is shown again."""
        del self._tokens[:1]
        self._update(again=True)

    def put_provisional(self, value: torch.Tensor) -> None:
        """A token follows that may be taken back."""
        self._tokens.append(int(value))
        self._update()

    def take_back(self, count: int) -> None:
        """The last tokens were wrong."""
        del self._tokens[-count:]
        self._update()

    def end(self) -> None:
        """The text is complete."""

    def _update(self, again: bool = False) -> None:
        text = self._preview(self._tokens)
        if text != self._shown or (again and text):
            self._shown = text
            self._show(text)


PORTION_TOKENS = 128
"""Positions whose scores are in memory at once: of a large vocabulary, 80 MB in float32."""


@torch.no_grad()
def prompt_scores(
    model: Any, session: InferenceSession, prompt: Sequence[int], count: int, before_portion: Callable[[], None]
) -> tuple[SampledToken, ...]:
    """The prompt's tokens as the model would have chosen them. The first has no log probability: it follows nothing.

    Args:
        model: the distributed model.
        session: at its beginning; at the end it holds the prompt.
        count: likeliest tokens to report for each position.
        before_portion: called before each portion, and may raise.
    """
    scored = [SampledToken(prompt[0])]
    session.text_length = len(prompt)
    for start in range(0, len(prompt), PORTION_TOKENS):
        before_portion()
        end = min(start + PORTION_TOKENS, len(prompt))
        logits_TV = model(
            torch.tensor([list(prompt[start:end])]),
            attention_mask=torch.ones(1, end, dtype=torch.long),
            past_key_values=session.cache,
            use_cache=True,
        ).logits[0]
        following = prompt[start + 1 : end + 1]  # the token behind each position; the prompt's last has none
        for token, scores_V in zip(following, logits_TV, strict=False):
            logprobs_V = torch.log_softmax(scores_V.float(), dim=-1)
            scored.append(SampledToken(token, float(logprobs_V[token]), top_tokens(logprobs_V, count)))
    session.text_length = 0
    return tuple(scored)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceProvisional:
    """What may follow the output so far, and may be taken back. The next delta or provisional text replaces it."""

    text: str


PROGRESS_PERIOD_S = 2.0
"""Seconds between two reports of how much of a prompt is computed."""


@dataclass(frozen=True)
class PromptProgress:
    """So many of the prompt's tokens are computed."""

    computed: int
    tokens: int


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


SequenceEvent = SequenceDelta | SequenceProvisional | PromptProgress | SequenceEnd | SequenceFailed | SessionEvent


class SequenceGeneration:
    """Generates one sequence in a thread of its own, from `start` on.

    Args:
        served: the model.
        request: see the attributes.
        on_event: called in the event loop for each event, in order; `SequenceEnd` or `SequenceFailed` comes last.
        owner: who may begin with what others of the same owner have left, and is left what this has computed.
        on_prompt: called in the event loop when the prompt is computed, for other sequences that begin with it; None
            if there are none.

    Attributes:
        request: what to generate.
        prompt: what another sequence with the same prompt has computed of it.
        cached_tokens: of the prompt that were computed for an earlier text.
        tokens: number of tokens generated so far.
        exits: those that left early.
        guesses: how many were verified, by draft and whether they stood.
    """

    def __init__(
        self,
        served: ServedModel,
        request: SequenceRequest,
        on_event: Callable[[SequenceEvent], None],
        owner: str = "",
        on_prompt: Callable[[Prefix | None], None] | None = None,
    ) -> None:
        self.prompt: Prefix | None = None
        self.cached_tokens = 0
        self._owner = owner
        self._on_prompt = on_prompt
        self._session: InferenceSession | None = None
        self.tokens = 0
        self.exits = ExitCounts()
        self.guesses: Counter[tuple[str, bool]] = Counter()
        self._on_event = on_event
        self._served = served
        self.request = request
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
        self._reported_at = time.monotonic()
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
        request = self.request
        max_length = len(request.prompt) + request.limit
        session = self._served.model.inference_session(max_length=max_length, listener=self._on_session_event)
        self._session = session
        try:
            images = None if request.images is None else request.images.take(self._served.model)  # takes seconds
            with self._ticket:
                if request.scores_prompt:
                    self._score_prompt(session)
                elif images is None:
                    self._begin_with_prefix(session)
                if request.limit:
                    self._generate_in(session, images)
            self._park(session)
        except CancelledError:
            self._park(session)
            raise
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

    def _begin_with_prefix(self, session: InferenceSession) -> None:
        prefix = self.prompt or self._served.prefixes.find(self._owner, self.request.prompt)
        if prefix is not None:
            begun = session.begin_with(prefix)
            self.cached_tokens = begun if self.prompt is None else 0

    def _park(self, session: InferenceSession) -> None:
        """Leave what was computed for the next text of the same owner, unless this process keeps nothing."""
        prefixes = self._served.prefixes
        if prefixes.capacity and self.request.images is None and (prefix := session.park()) is not None:
            prefixes.add(self._owner, prefix)

    def _share_prompt(self) -> None:
        """Let the other sequences of the prompt begin, with what this one has computed of it if that is possible."""
        on_prompt, self._on_prompt = self._on_prompt, None
        if on_prompt is not None and self._session is not None:
            self._call_in_loop(on_prompt, self._session.share(len(self.request.prompt)))

    def _score_prompt(self, session: InferenceSession) -> None:
        if self.request.early_exit is not None:
            session.prepare_for(self.request.early_exit)  # not possible once it has computed tokens
        count = self.request.top_logprobs or 0
        scored = prompt_scores(
            self._served.model, session, self.request.prompt, count, before_portion=self._require_running
        )
        self._emit(SequenceDelta("", prompt=scored))

    def _require_running(self) -> None:
        if self._cancelled:
            raise CancelledError

    def _generate_in(self, session: InferenceSession, images: Any) -> None:
        """Run `generate`. Early exit is optional: where the route has no place for it, no token leaves.

        Nor does one where early exit is a default that the model's own settings rule out.
        """
        request = self.request
        streamer = ProvisionalText(self._preview, lambda text: self._emit(SequenceProvisional(text)))
        generate = partial(
            self._served.model.generate,
            torch.tensor([list(request.prompt)]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            session=session,
            prompt_images=images,
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
        drafts = self._served.drafts if request.early_exit is None else ()
        try:
            generate(early_exit=request.early_exit, draft=drafts)
        except (NoExitClassifiers, ProcessorsWithState) as error:
            if isinstance(error, ProcessorsWithState) and request.early_exit is not None and request.is_exit_asked:
                raise
            self._served.warn_once(f"{'No token is guessed' if drafts else 'No token leaves early'}: {error}")
            generate(early_exit=None)  # goes on behind the prompt, if that is computed

    def _model_settings(self) -> dict[str, Any]:
        """What the request sets of the model's own generation settings."""
        settings: dict[str, Any] = {}
        if self.request.end_tokens:
            settings["eos_token_id"] = sorted(self._end_tokens)
        if self.request.repetition_penalty is not None:
            settings["repetition_penalty"] = self.request.repetition_penalty
        return settings

    def _stopping_criterion(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """transformers' hook: whether the sequence is complete with the token that now stands at its end."""
        self._require_running()
        self._share_prompt()
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
        elif isinstance(event, GuessVerified):
            self.guesses[event.draft, event.stands] += 1
        elif isinstance(event, PromptComputed):
            # Later, a text whose rotary frequencies change is computed anew: that is no part of the prompt.
            if not self.tokens and (now := time.monotonic()) - self._reported_at >= PROGRESS_PERIOD_S:
                self._reported_at = now
                self._emit(PromptProgress(event.tokens, len(self.request.prompt)))
        else:
            self._emit(event)

    def _emit(self, event: SequenceEvent) -> None:
        self._call_in_loop(self._on_event, event)

    def _call_in_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: the process is ending
            logger.debug("a generation ended after its event loop")
