"""Prompts for the tiny models of the client's tests, and greedy texts behind them."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo import PROMPTS

PAD = 0
NEW = 24


def prompt(length: int = 7, seed: int = 3) -> torch.Tensor:
    """Token ids `[1, length]`, the same for the same arguments."""
    return torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def padded_batch() -> dict[str, torch.Tensor]:
    """Prompts of different lengths with `PAD` on their left, and their mask: keyword arguments of `generate`."""
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[PAD] * (longest - len(row)) + row for row in PROMPTS])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


def greedy(model: Any, tokens: torch.Tensor | None = None, new: int = NEW, **more: Any) -> torch.Tensor:
    """The prompt with `new` greedy tokens behind it, `[sequences, tokens]`."""
    texts: torch.Tensor = model.generate(tokens, max_new_tokens=new, do_sample=False, pad_token_id=PAD, **more)
    return texts
