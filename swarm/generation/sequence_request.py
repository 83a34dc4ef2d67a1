"""What is asked of one sequence, and of the answers to a request."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.client.early_exit.options import EarlyExit
from swarm.client.threads.compute_lock import keep_thread_limit
from swarm.generation.formats.response_format import AnswerForm
from swarm.generation.formats.thinking import ThinkingParser, TokenConstraint
from swarm.generation.formats.tool_calls import ToolCallParser
from swarm.models.checkpoints.checkpoint import Pooling

ROOM_LEFT = -1
"""As `max_tokens`: as many as the context has room for."""


class RequestImages:
    """A prompt's images, as the model's processor returns them. The tower sees them once, for all answers."""

    def __init__(self, prompt: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> None:
        self.bytes = sum(one.nbytes for one in tensors.values())
        self._prompt, self._tensors = prompt, tensors
        self._lock, self._features = threading.Lock(), None

    def take(self, model: Any) -> Any:
        """What `generate` takes as `prompt_images`. Raises `ImageRefused` if the images do not fit the prompt."""
        with self._lock:
            if self._features is None:
                keep_thread_limit()
                self._features = model.prompt_images(torch.tensor([list(self._prompt)]), **self._tensors)
            return self._features


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate. A request asks for it without a prompt; `prompts` adds what depends on the model.

    Where an option is None, the model's own default applies, and OpenAI's if it has none.

    Attributes:
        max_tokens: new tokens that were asked for; `ROOM_LEFT` is possible.
        max_tokens_fit: where the context has less room, as many as it has are generated; otherwise that is refused.
        top_k: 0 or less samples from all tokens.
        min_p: sample from tokens that have this share of the likeliest one's probability.
        presence_penalty: subtracted from a token's score if it was generated before.
        frequency_penalty: subtracted from a token's score for each time that it was generated.
        repetition_penalty: transformers' own.
        logit_bias: added to the scores of these tokens.
        seed: None takes a new one each time.
        stops: texts at which the sequence ends.
        end_tokens: tokens at which it ends, besides the model's own; they are not part of the text.
        prompt_tokens: how many tokens of a longer prompt are kept, the last ones; -1 as many as fit; None refuses it.
        form: that the text must have; None for any.
        separate_thoughts: whether thoughts are apart from the text.
        top_logprobs: likeliest tokens to report for each position; None reports no log probabilities.
        scores_prompt: whether the log probabilities of the prompt's tokens are reported, with as many likeliest tokens
            as for new ones; then the token that ends the sequence is reported as well.
        pooling: ask for the prompt's embedding instead of new tokens: the mean or the last of its final hidden states.
        early_exit: when tokens leave before the last block; None for never.
        is_exit_asked: whether the request asks for that itself, rather than having it by default.
        provisional: whether the text of tokens that left is shown before they are verified.
        prompt: token ids.
        images: those among the tokens.
        limit: how many tokens may be generated behind this prompt; may be 0.
        constraint: restricts the tokens to the form and to tool calls; None for any.
        tools: parses tool calls in the text; None if there are no tools.
        thinking: separates thoughts from the text; None if there are none, or they are part of the text.
    """

    max_tokens: int | None = None
    max_tokens_fit: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    end_tokens: Sequence[int] = ()
    prompt_tokens: int | None = None
    form: AnswerForm | None = None
    separate_thoughts: bool = False
    top_logprobs: int | None = None
    scores_prompt: bool = False
    pooling: Pooling | None = None
    early_exit: EarlyExit | None = None
    is_exit_asked: bool = False
    provisional: bool = False
    prompt: Sequence[int] = ()
    images: RequestImages | None = None
    limit: int = 0
    constraint: TokenConstraint | None = None
    tools: ToolCallParser | None = None
    thinking: ThinkingParser | None = None
