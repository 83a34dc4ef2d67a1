"""Generates one sequence: a thread runs transformers' `generate`, and the event loop receives what happens.

Laws:
- The sequences of a model share its compute lock: one computes its head and samples while the others wait for the
  swarm. So many requests are lanes of one pipeline, and servers batch their steps.
- Each sequence has inference sessions of its own, one at a time. `cancel` ends its wait for the swarm at any point, and
  its session is then freed on all servers.
- The thread never waits for the reader: its output is bounded by its limit and is kept until it is read.
- Room at the servers is reserved for a portion of the text at a time. Between two portions the text holds none, and its
  cache is parked, so no two texts wait for what the other one holds. The next portion goes on with what servers still
  have (`RoomQueue` says whose turn it is).
- Only tokens that stand become output: transformers asks the stopping criterion behind each of them, whether tokens
  may leave early or not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import torch

from swarm.client.chain.prefix import Prefix
from swarm.client.routes.events import ExitTaken, ExitVerified, GuessVerified, PromptComputed, RouteTaken, SessionEvent
from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.data_structures import Span
from swarm.errors import CacheFull, NoExitClassifiers, ProcessorsWithState, SwarmError, TooLong, UsageError
from swarm.generation.early_exits import ExitCounts, ProvisionalText, count_exit
from swarm.generation.errors import EXPECTED_ERRORS, GenerationCancelled, GenerationCrashed, InvalidGenerationRequest
from swarm.generation.sampling import SampledToken, Sampler, top_tokens
from swarm.generation.sequence_output import IncrementalDetokenizer, SequenceDelta, SequenceOutput
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel
from swarm.models.checkpoints.checkpoint import Pooling
from swarm.models.rope_lengths import rope_limit

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
    for logits_TV in _portions(model, session, prompt, before_portion, "logits"):
        following = prompt[len(scored) :]  # the token behind each position; the prompt's last has none
        for token, scores_V in zip(following, logits_TV, strict=False):
            logprobs_V = torch.log_softmax(scores_V.float(), dim=-1)
            scored.append(SampledToken(token, float(logprobs_V[token]), top_tokens(logprobs_V, count)))
    return tuple(scored)


@torch.no_grad()
def prompt_embedding(
    model: Any, session: InferenceSession, prompt: Sequence[int], pooling: Pooling, before_portion: Callable[[], None]
) -> tuple[float, ...]:
    """The mean or the last of a prompt's final hidden states, behind the last norm, with length 1. Args as above."""
    total_H = torch.zeros(())
    for states_TH in _portions(model.base_model, session, prompt, before_portion, "last_hidden_state"):
        total_H = states_TH[-1].float() if pooling == "last" else total_H + states_TH.float().sum(0)
    return tuple(torch.nn.functional.normalize(total_H, dim=0).tolist())


def _portions(
    model: Any, session: InferenceSession, prompt: Sequence[int], before_portion: Callable[[], None], output: str
) -> Iterator[torch.Tensor]:
    """What a model computes of a prompt, `[T, …]` for each portion of its tokens."""
    session.text_length = len(prompt)
    for start in range(0, len(prompt), PORTION_TOKENS):
        before_portion()
        end = min(start + PORTION_TOKENS, len(prompt))
        outputs = model(
            torch.tensor([list(prompt[start:end])]),
            attention_mask=torch.ones(1, end, dtype=torch.long),
            past_key_values=session.cache,
            use_cache=True,
        )
        yield outputs[output][0]
    session.text_length = 0


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


MIN_PORTION_TOKENS, MAX_PORTION_TOKENS = 256, 1024
"""For how many new tokens servers are asked for room at once, within these bounds: as many as there are already. Few
texts are as long as they may be."""

SETTINGS_OF_ONE_CALL = (
    *("min_new_tokens", "max_time", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("watermarking_config", "guidance_scale"),
)
"""Of the model's generation settings, those that depend on where `generate` began."""

ROOM_ATTEMPT_S = 1.0
"""Seconds for which servers are asked for room at a time."""

ROOM_TIMEOUT_S = 60.0
"""Seconds after which a text gives up if no server has room and no other text of this process has any to give back."""


@dataclass(frozen=True)
class RoomAwaited:
    """The servers have no room for the text now. It goes on when its turn has come."""


@dataclass(frozen=True)
class SequenceEmbedding:
    """The prompt's embedding."""

    vector: tuple[float, ...]


@dataclass(frozen=True)
class SequenceEnd:
    """The sequence is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        tokens: how many were generated.
        stop: the stop sequence that ended it; None if none did.
    """

    reason: str
    tokens: int
    stop: str | None = None


@dataclass(frozen=True)
class SequenceFailed:
    """The sequence cannot be completed."""

    error: SwarmError


SequenceEvent = (
    SequenceDelta
    | SequenceProvisional
    | SequenceEmbedding
    | PromptProgress
    | RoomAwaited
    | SequenceEnd
    | SequenceFailed
    | SessionEvent
)


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
        thought_tokens: those of them that belong to thoughts.
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
        self._holds_room = False
        self._kept: Prefix | None = None
        self._hops: list[tuple[str, Span]] = []
        self._text = list(request.prompt)
        self.tokens = 0
        self.thought_tokens = 0
        self.exits: ExitCounts = Counter()
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
            outcome = SequenceEnd(self._generate(), self.tokens, self._output.stop)
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
        """Write the text, portion by portion, and return the finish reason."""
        request = self.request
        self._number = self._served.room.next_number()
        self._kept = self.prompt or self._stored_prefix()
        try:
            images = None if request.images is None else request.images.take(self._served.model)  # takes seconds
            with self._ticket:
                while not self._write_portion(images):
                    pass
            self._park()
        except CancelledError:
            self._park()
            raise
        except UsageError as error:
            if request.early_exit is None or type(error) not in (UsageError, ProcessorsWithState):
                raise  # not about its options
            raise InvalidGenerationRequest(str(error), parameter="early_exit") from error
        finally:
            self._close()  # outside of the ticket, which may have been cancelled
        last = self._output.finish()
        if last.text or last.calls or last.tokens or last.thought:
            self._emit(last)
        if self._output.has_calls and not self._output.is_cut:
            return "tool_calls"
        return "stop" if self._output.stopped or self._last_token in self._end_tokens else "length"

    def _write_portion(self, images: Any) -> bool:
        """Write as much as the session has room for; whether the text is complete."""
        portion, before = self._portion(), self.tokens
        max_length = len(self._text) + portion
        self._session = session = self._served.model.inference_session(
            max_length=max_length, listener=self._on_session_event
        )
        if self.request.early_exit is not None:
            session.prepare_for(self.request.early_exit)
        try:
            self._take_room(session)
            if self.request.scores_prompt and not before:
                self._score_prompt(session)
            if self.request.pooling is not None:
                vector = prompt_embedding(
                    self._served.model, session, self.request.prompt, self.request.pooling, self._require_running
                )
                self._emit(SequenceEmbedding(vector))
            if portion:
                self._generate_in(session, images, portion)
        except TooLong as error:
            if not self.tokens:
                raise
            logger.info("A text ends after %d tokens, because no server takes a longer one: %s", self.tokens, error)
            return True
        except CacheFull as error:  # what the servers have taken back is written anew
            if not self._in_portions or not self._holds_room or self.tokens == before:
                raise
            logger.info("A text waits for room again: %s", error)
            self._kept = None
            self._close()
            return False
        is_whole = self.tokens - before == portion and self.tokens < self.request.limit
        if self._output.stopped or self._last_token in self._end_tokens or not is_whole:
            return True
        self._kept = session.park()
        self._close()
        return False

    def _portion(self) -> int:
        """For how many more tokens the servers are asked for room."""
        left = self.request.limit - self.tokens
        return min(left, max(MIN_PORTION_TOKENS, min(self.tokens, MAX_PORTION_TOKENS))) if self._in_portions else left

    @cached_property
    def _in_portions(self) -> bool:
        """Whether the text may go on in another session as if it was the same."""
        request, model = self.request, self._served.model
        limit = rope_limit(model.config)
        return (
            request.images is None
            and model.prompts is None
            and (request.early_exit is None or request.early_exit.fill == "exact")
            and (limit is None or len(request.prompt) + request.limit <= limit)
            and not any(getattr(model.generation_config, name, None) for name in SETTINGS_OF_ONE_CALL)
        )

    def _take_room(self, session: InferenceSession) -> None:
        """Open the session: at once if the queue for room is empty, else when the text's turn has come.

        Raises:
            CacheFull: no server has room, and no text of this process is going to give some back.
        """
        room = self._served.room
        if not room.is_empty or self._refusal(session, 0.0) is not None:
            self._emit(RoomAwaited())
            with room.place(self._owner, self._number) as place:
                self._ticket.wait(place.turn)
                self._wait_for_room(session)
        room.note_held(1)
        self._holds_room = True

    def _wait_for_room(self, session: InferenceSession) -> None:
        """Ask again and again, while there is hope."""
        hopeful_at = time.monotonic()
        while True:
            asked_at = time.monotonic()
            refusal = self._refusal(session, ROOM_ATTEMPT_S)
            if refusal is None:
                return
            now = time.monotonic()
            hopeful_at = now if self._served.room.holding else hopeful_at
            if now - hopeful_at > ROOM_TIMEOUT_S:
                raise refusal
            self._served.model.swarm.run(asyncio.sleep(max(0.0, asked_at + ROOM_ATTEMPT_S - now)))

    def _refusal(self, session: InferenceSession, timeout_s: float) -> CacheFull | None:
        """Open the session, with what was computed before as far as servers still have it; None, or why there is no
        room for it."""
        session.room_timeout = timeout_s
        try:
            if self._kept is not None:
                begun = session.begin_with(self._kept)
                if not self.tokens and self.prompt is None:
                    self.cached_tokens = begun
            session.open()
        except CacheFull as error:
            return error
        session.room_timeout = None  # a lost server is replaced as in any session
        return None

    def _close(self) -> None:
        """Give the session's room back, if it is not parked."""
        if self._session is not None:
            self._session.close()
        if self._holds_room:
            self._served.room.note_held(-1)
            self._holds_room = False

    def _stored_prefix(self) -> Prefix | None:
        if self.request.images is not None or self.request.scores_prompt or self.request.pooling is not None:
            return None
        return self._served.prefixes.find(self._owner, self.request.prompt)

    def _park(self) -> None:
        """Leave what was computed for the next text of the same owner, unless this process keeps nothing."""
        prefixes, session = self._served.prefixes, self._session
        if session is None or not prefixes.capacity or self.request.images is not None:
            return
        if (prefix := session.park()) is not None:
            prefixes.add(self._owner, prefix)

    def _share_prompt(self) -> None:
        """Let the other sequences of the prompt begin, with what this one has computed of it if that is possible."""
        on_prompt, self._on_prompt = self._on_prompt, None
        if on_prompt is not None and self._session is not None:
            self._call_in_loop(on_prompt, self._session.share(len(self.request.prompt)))

    def _score_prompt(self, session: InferenceSession) -> None:
        count = self.request.top_logprobs or 0
        scored = prompt_scores(
            self._served.model, session, self.request.prompt, count, before_portion=self._require_running
        )
        self._emit(SequenceDelta("", prompt=scored))

    def _require_running(self) -> None:
        if self._cancelled:
            raise CancelledError

    def _generate_in(self, session: InferenceSession, images: Any, portion: int) -> None:
        """Run `generate` for a portion. Early exit is optional: where the route has no place for it, no token leaves.

        Nor does one where early exit is a default that the model's own settings rule out.
        """
        request = self.request
        streamer = ProvisionalText(self._preview, lambda text: self._emit(SequenceProvisional(text)))
        generate = partial(
            self._served.model.generate,
            torch.tensor([self._text]),
            attention_mask=torch.ones(1, len(self._text), dtype=torch.long),
            session=session,
            prompt_images=images,
            max_new_tokens=portion,
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
        self._text.append(token)
        sampled = self._sampler.sampled(token, self.tokens)
        self.tokens += 1
        delta = self._output.add_token(sampled, is_end=token in self._end_tokens)
        self.thought_tokens += self._output.is_thinking
        if delta is not None:
            self._emit(delta)

    def _preview(self, tokens: Sequence[int]) -> str:
        return self._output.preview(list(takewhile(lambda token: token not in self._end_tokens, tokens)))

    def _on_session_event(self, event: SessionEvent) -> None:
        if isinstance(event, ExitTaken | ExitVerified):
            count_exit(self.exits, event)  # up to two a token: not worth an event each
        elif isinstance(event, GuessVerified):
            self.guesses[event.draft, event.stands] += 1
        elif isinstance(event, RouteTaken):
            hops = [(hop.server.peer_id, hop.span) for hop in event.route.hops]
            if hops != self._hops:  # the next portion of a text usually goes by the same servers
                self._hops = hops
                self._emit(event)
        elif isinstance(event, PromptComputed):
            # Later chunks are not the prompt's: a text whose rotary frequencies change is computed again.
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
