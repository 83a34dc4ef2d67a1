"""Speculative decoding (Leviathan et al., 2023) with transformers' own assisted generation.

A draft model at this client, or the prompt itself, proposes candidates; the swarm computes them in one step, and those
that are rejected are set back with the next one. What is accepted costs one round trip instead of one a token.
"""

from __future__ import annotations

from typing import Any

from swarm.errors import UsageError


def validate_speculation(generation_config: Any, is_draft_remote: bool) -> None:
    """Raise `UsageError` if candidates are wanted from what is not here.

    Args:
        is_draft_remote: the draft model's blocks are in a swarm, too.
    """
    if is_draft_remote:
        raise UsageError(
            "the assistant_model has to run at this client, because each of its tokens would cost a round trip; load a "
            "small model with transformers' from_pretrained"
        )
    if generation_config.assistant_early_exit is not None:
        raise UsageError(
            "assistant_early_exit drafts with the model's first blocks, which are not at this client; use a small "
            "assistant_model, or prompt_lookup_num_tokens"
        )


def bound_candidates(generator: Any, limit: int) -> Any:
    """The same candidate generator, whose sequences have at most `limit` tokens.

    The model's own token follows the last candidate, so nothing behind `limit` could be used; but servers would have to
    keep room for it. Raises `UsageError` if it wants to see what happens inside of the model.
    """
    if generator.requires_model_outputs:
        raise UsageError(
            f"{type(generator).__name__} drafts from hidden states inside of the model, which are not at this client; "
            "use a small assistant_model, or prompt_lookup_num_tokens"
        )
    get_candidates = generator.get_candidates

    def get_bounded(input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        tokens, logits = get_candidates(input_ids, **kwargs)
        length = max(limit, input_ids.shape[1])
        return tokens[:, :length], logits[:, : length - input_ids.shape[1]] if logits is not None else None

    generator.get_candidates = get_bounded
    return generator


def unseen_length(cache_length: int, input_length: int, mask_length: int | None) -> int | None:
    """How many of the last tokens of a prompt have to be computed, where a session has computed those before already.

    transformers' assisted generation passes all of them, as if its cache were always empty at first. None: all, because
    nothing is computed yet, or because what was passed is only what is new.
    """
    if not 0 < cache_length < input_length or mask_length not in (None, input_length):
        return None
    return input_length - cache_length
