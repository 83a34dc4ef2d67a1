"""What transformers' `generate` returns with `return_dict_in_generate`, for loops that are not transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput


def generation_output(
    sequences: torch.Tensor,
    scores: tuple[torch.Tensor, ...] | None,
    logits: tuple[torch.Tensor, ...] | None,
    cache: Any,
) -> GenerateDecoderOnlyOutput:
    """transformers' output object of a decoder.

    Args:
        sequences: token ids `[sequences, length]`, prompts included.
        scores, logits: for each new token, processed and not, `[sequences, vocabulary]` float32; None if not asked for.
        cache: as transformers sees it.
    """
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)
