"""Chooses the next token of one sequence from the model's scores.

`Sampler` is one of transformers' logits processors: `generate` calls it last, after those of the model's own generation
settings, and then takes the only token that it leaves. So each sequence has its own seed, whatever other sequences of
this process sample meanwhile.

What it chooses depends on the seed, the tokens before and the scores, and on nothing else. So a token may be chosen
several times: early, as a guess, and again from the full model's scores. The random numbers of a position are always
the same, so the text is the one that the seed gives without guesses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from swarm.errors import SwarmError

MIN_TEMPERATURE = 1e-6
"""Lower temperatures count as 0: scores divided by them would overflow."""


class TokenConstraint(Protocol):
    """Restricts the next token, such as to those that continue a JSON text."""

    def mask(self, tokens: Sequence[int], scores_V: torch.Tensor) -> torch.Tensor:
        """The scores `[vocabulary]`, -inf where a token is not allowed behind the generated `tokens`.

        Raises:
            SwarmError: it cannot say which are, behind these tokens.
        """


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: sample from the smallest set of tokens with this probability.
        top_k: sample from this many tokens; None for all.
        min_p: sample from tokens that have this share of the likeliest one's probability.
        presence_penalty: subtracted from a token's score if it was generated before.
        frequency_penalty: subtracted from a token's score for each time that it was generated.
        logit_bias: added to the scores of these tokens.
        seed: None takes a new one each time.
        top_logprobs: likeliest tokens to report for each position; None reports no log probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class SampledToken:
    """A token that was chosen.

    Attributes:
        logprob: its log probability before temperature, top_p, top_k and min_p; None if not requested.
        top_logprobs: the likeliest tokens with theirs; of a prompt's first token, which follows nothing, none.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence.

    Args:
        options: how to choose.
        prompt_tokens: tokens of the sequence that were not generated.
        constraint: restricts the tokens; None allows all.
    """

    def __init__(
        self, options: SamplingOptions, prompt_tokens: int = 0, constraint: TokenConstraint | None = None
    ) -> None:
        self._options = options
        self._prompt_tokens = prompt_tokens
        self._constraint = constraint
        self._random = torch.Generator()
        self._seed = self._random.seed() if options.seed is None else options.seed
        self._reported: dict[int, torch.Tensor] = {}
        """By position, the scores from which its token was chosen last; only if log probabilities are requested."""
        self._standing = 0
        """Generated tokens that stand; those behind them are guesses."""
        self._warpers: list[Any] = []
        if options.top_k is not None:
            self._warpers.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(options.top_p))
        if options.min_p > 0.0:
            self._warpers.append(MinPLogitsWarper(options.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """transformers' hook: takes scores `[1, vocabulary]` and returns them with all but the chosen token at -inf."""
        generated = input_ids[0, self._prompt_tokens :]
        scores_V = self._adjust_scores(generated, scores[0].float())
        token = self._choose(input_ids, scores_V, len(generated))
        if self._options.top_logprobs is not None:
            self._reported[len(generated)] = scores_V
        only = torch.full_like(scores, float("-inf"))
        only[0, token] = 0.0
        return only

    def sampled(self, token: int, position: int) -> SampledToken:
        """A token that now stands, with its log probabilities by the scores that were seen last for its position.

        Args:
            position: among the generated tokens, from 0. Is asked for once, in order.
        """
        self._standing = position + 1
        count = self._options.top_logprobs
        if count is None:
            return SampledToken(token)
        logprobs_V = torch.log_softmax(self._reported.pop(position), dim=-1)
        return SampledToken(token, float(logprobs_V[token]), top_tokens(logprobs_V, count))

    def _adjust_scores(self, generated: torch.Tensor, scores_V: torch.Tensor) -> torch.Tensor:
        """Apply biases, penalties and the constraint."""
        options = self._options
        has_penalty = bool(len(generated) and (options.presence_penalty or options.frequency_penalty))
        if options.logit_bias or has_penalty:
            scores_V = scores_V.clone()
        for token, bias in (options.logit_bias or {}).items():
            scores_V[token] += bias
        if has_penalty:
            seen, counts = generated.to(scores_V.device).unique(return_counts=True)
            scores_V[seen] -= options.presence_penalty + options.frequency_penalty * counts
        return self._constrained(generated.tolist(), scores_V)

    def _constrained(self, generated: list[int], scores_V: torch.Tensor) -> torch.Tensor:
        if self._constraint is None:
            return scores_V
        try:
            return self._constraint.mask(generated, scores_V)
        except SwarmError:
            if len(generated) <= self._standing:
                raise
            return scores_V  # behind a guess: any token will do, and if the guess stands, this comes again

    def _choose(self, input_ids: torch.Tensor, scores_V: torch.Tensor, position: int) -> int:
        if self._options.temperature < MIN_TEMPERATURE:
            return int(scores_V.argmax())
        scores_BV = (scores_V / self._options.temperature).unsqueeze(0)
        for warper in self._warpers:
            scores_BV = warper(input_ids, scores_BV)
        # Always on the CPU: the same seed has to give the same text on every device.
        probabilities = torch.softmax(scores_BV[0], dim=-1).cpu()
        self._random.manual_seed(position_seed(self._seed, position))
        return int(torch.multinomial(probabilities, 1, generator=self._random))


def top_tokens(logprobs_V: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens with their log probabilities, the likeliest first."""
    best = torch.topk(logprobs_V, min(count, len(logprobs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def position_seed(seed: int, position: int) -> int:
    """The seed of a position's random numbers: torch's generator uses 32 bits, so all bits are mixed into these."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest)
