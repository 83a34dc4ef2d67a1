"""The log probabilities of a prompt's tokens: a portion of the prompt at a time, in the session that then goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarm.client.session import InferenceSession
from swarm.generation.sampling import SampledToken, top_tokens

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
