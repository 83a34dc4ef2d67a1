"""How sure a token is of its successor, and from which value on it leaves. Pure.

After "An Efficient Inference Framework for Early-exit LLMs", section 2.1; the decaying threshold is that of CALM
(Schuster et al., 2022, section 3.3).
"""

from __future__ import annotations

import math

import torch

FLOOR_SHARE = 0.9
"""What a decaying threshold falls to, as a share of its value."""


def softmax_response(logits_RV: torch.Tensor) -> torch.Tensor:
    """The difference of the two largest probabilities, `[R]` float32, for logits of each sequence."""
    if logits_RV.shape[-1] < 2:
        return torch.ones(logits_RV.shape[0])
    top_R2 = logits_RV.float().softmax(-1).topk(2, dim=-1).values
    return top_R2[:, 0] - top_R2[:, 1]


def state_similarity(before_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    """The cosine of successive hidden states of each sequence, `[R]` float32."""
    return torch.nn.functional.cosine_similarity(before_RH.float(), hidden_RH.float(), dim=-1)


def decayed_threshold(threshold: float, decay: float, position: int, length: int) -> float:
    """The threshold at a position of a text: it falls from `threshold` towards nine tenths of it.

    Args:
        decay: CALM's tau: how quickly.
        position: of the token among those that are generated, from 0.
        length: how many will be generated at most.
    """
    if not decay:
        return threshold
    share = FLOOR_SHARE + (1 - FLOOR_SHARE) * math.exp(-decay * position / max(1, length))
    return min(1.0, max(0.0, threshold * share))
