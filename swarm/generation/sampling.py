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
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from swarm.errors import SwarmError
from swarm.generation.sequence_request import SequenceRequest

MIN_TEMPERATURE = 1e-6
"""Lower temperatures count as 0: scores divided by them would overflow."""


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
        request: how to choose.
    """

    def __init__(self, request: SequenceRequest) -> None:
        self._request = request
        self._temperature = 1.0 if request.temperature is None else request.temperature
        self._random = torch.Generator()
        self._seed = self._random.seed() if request.seed is None else request.seed
        self._reported: dict[int, torch.Tensor] = {}
        """By position, the scores from which its token was chosen last; only if log probabilities are requested."""
        self._standing = 0
        """Generated tokens that stand; those behind them are guesses."""
        self._warpers: list[Any] = []
        if request.top_k is not None and request.top_k > 0:
            self._warpers.append(TopKLogitsWarper(request.top_k))
        if request.top_p is not None and request.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(float(request.top_p)))
        if request.min_p is not None and request.min_p > 0.0:
            self._warpers.append(MinPLogitsWarper(request.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """transformers' hook: takes scores `[1, vocabulary]` and returns them with all but the chosen token at -inf."""
        generated = input_ids[0, len(self._request.prompt) :]
        scores_V = self._adjust_scores(generated, scores[0].float())
        token = self._choose(input_ids, scores_V, len(generated))
        if self._request.top_logprobs is not None:
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
        count = self._request.top_logprobs
        if count is None:
            return SampledToken(token)
        logprobs_V = torch.log_softmax(self._reported.pop(position), dim=-1)
        return SampledToken(token, float(logprobs_V[token]), top_tokens(logprobs_V, count))

    def _adjust_scores(self, generated: torch.Tensor, scores_V: torch.Tensor) -> torch.Tensor:
        """Apply biases, penalties and the constraint."""
        presence, frequency = self._request.presence_penalty or 0.0, self._request.frequency_penalty or 0.0
        has_penalty = bool(len(generated) and (presence or frequency))
        if self._request.logit_bias or has_penalty:
            scores_V = scores_V.clone()
        for token, bias in (self._request.logit_bias or {}).items():
            scores_V[token] += bias
        if has_penalty:
            seen, counts = generated.to(scores_V.device).unique(return_counts=True)
            scores_V[seen] -= presence + frequency * counts
        return self._constrained(generated.tolist(), scores_V)

    def _constrained(self, generated: list[int], scores_V: torch.Tensor) -> torch.Tensor:
        if self._request.constraint is None:
            return scores_V
        try:
            return self._request.constraint.mask(generated, scores_V)
        except SwarmError:
            if len(generated) <= self._standing:
                raise
            return scores_V  # behind a guess: any token will do, and if the guess stands, this comes again

    def _choose(self, input_ids: torch.Tensor, scores_V: torch.Tensor, position: int) -> int:
        if self._temperature < MIN_TEMPERATURE:
            return int(scores_V.argmax())
        scores_BV = (scores_V / self._temperature).unsqueeze(0)
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
