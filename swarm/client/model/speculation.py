"""Speculative decoding (Leviathan et al., 2023) with transformers' own assisted generation.

A draft model at this client, or the prompt itself, proposes candidates. The swarm computes all of them in one step, and
the next step rolls back those that were rejected. Accepted candidates cost one round trip instead of one a token.
"""

from __future__ import annotations

from typing import Any

from swarm.errors import UsageError


def validate_speculation(generation_config: Any, is_draft_remote: bool) -> None:
    """Raise `UsageError` if the candidates cannot come from this client.

    Args:
        is_draft_remote: whether the blocks of the draft model are in a swarm as well.
    """
    if is_draft_remote:
        raise UsageError(
            "the assistant_model has to run at this client, because each of its tokens would cost a round trip; load a "
            "small model with from_pretrained of transformers"
        )
    if generation_config.assistant_early_exit is not None:
        raise UsageError(
            "assistant_early_exit drafts with the first blocks of the model, which are not at this client; use a small "
            "assistant_model, or prompt_lookup_num_tokens"
        )


def bound_candidates(generator: Any, limit: int, rope_limit: int | None = None, has_dynamic_rope: bool = False) -> Any:
    """Patch a candidate generator so that its sequences have at most `limit` tokens.

    The model's own token follows the last candidate, so candidates beyond `limit` cannot be used, but servers would
    have to reserve cache space for them. Nor do candidates change the rotary frequencies that the tokens before them
    would have without.

    Args:
        rope_limit, has_dynamic_rope: of the model, see `swarm.models.rope_lengths`.

    Raises:
        UsageError: the generator needs hidden states from inside the model.
    """
    if generator.requires_model_outputs:
        raise UsageError(
            f"{type(generator).__name__} drafts from hidden states inside the model, which are not at this client; "
            "use a small assistant_model, or prompt_lookup_num_tokens"
        )
    get_candidates = generator.get_candidates

    def get_bounded(input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        tokens, logits = get_candidates(input_ids, **kwargs)
        length, most = input_ids.shape[1], limit
        if rope_limit is not None and (length <= rope_limit or has_dynamic_rope):
            most = min(limit, rope_limit)
        length = max(most, length)
        return tokens[:, :length], logits[:, : length - input_ids.shape[1]] if logits is not None else None

    generator.get_candidates = get_bounded
    return generator


def unseen_length(cache_length: int, input_length: int, mask_length: int | None) -> int | None:
    """How many of the last tokens of a prompt still have to be computed, if a session has computed those before.

    transformers' assisted generation always passes the whole prompt, as if the cache were empty at first. None means
    all tokens that were passed: nothing is computed yet, or only new tokens were passed.
    """
    if not 0 < cache_length < input_length or mask_length not in (None, input_length):
        return None
    return input_length - cache_length
