"""Which tokens of a text leave, and what follows from it if all caches are exact. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AtExit:
    """All tokens of the held-out texts at one exit, each `[W, T]`: windows and tokens.

    Attributes:
        confidence: by kind.
        token: the likeliest successor.
        nats: loss of the text's own successor.
    """

    confidence: Mapping[str, torch.Tensor]
    token: torch.Tensor
    nats: torch.Tensor


@dataclass(frozen=True)
class Quality:
    """What a rule for leaving costs and saves, over all tokens.

    Attributes:
        left: share of tokens that left.
        skipped: share of blocks that were not computed.
        agreement: share of tokens whose successor is the full model's.
        perplexity: relative to the full model's, minus one.
    """

    left: float
    skipped: float
    agreement: float
    perplexity: float


def leave(confidence: Mapping[int, torch.Tensor], threshold: float, batch: int, rule: str) -> torch.Tensor:
    """In front of which block each token leaves, `[W, T]`; 0 for those that do not.

    Args:
        confidence: `[W, T]`, by exit block, ascending.
        batch: windows that are computed together.
        rule: "row": each by itself. "all": once all of the batch have been sure.
    """
    left_WT = torch.zeros_like(next(iter(confidence.values())), dtype=torch.long)
    sure_WT = torch.zeros_like(left_WT, dtype=torch.bool)
    for block, value_WT in confidence.items():
        sure_WT = sure_WT | (value_WT > threshold)
        leaves_WT = sure_WT
        if rule == "all":
            leaves_WT = sure_WT.view(-1, batch, sure_WT.shape[1]).all(1).repeat_interleave(batch, 0)
        left_WT = torch.where((left_WT == 0) & leaves_WT, block, left_WT)
    return left_WT


def quality(left_WT: torch.Tensor, exits: Mapping[int, AtExit], full: AtExit, blocks: int) -> Quality:
    """What follows from where tokens leave, if caches are exact."""
    token_WT, nats_WT = full.token, full.nats
    for block, at in exits.items():
        token_WT = torch.where(left_WT == block, at.token, token_WT)
        nats_WT = torch.where(left_WT == block, at.nats, nats_WT)
    return measured(left_WT, token_WT, nats_WT, full, blocks)


def measured(
    left_WT: torch.Tensor, token_WT: torch.Tensor, nats_WT: torch.Tensor, full: AtExit, blocks: int
) -> Quality:
    """Compare chosen tokens and losses with the full model's."""
    skipped_WT = torch.where(left_WT > 0, blocks - left_WT, 0).float()
    return Quality(
        float((left_WT > 0).float().mean()),
        float(skipped_WT.mean()) / blocks,
        float((token_WT == full.token).float().mean()),
        math.expm1(float(nats_WT.mean() - full.nats.mean())),
    )
