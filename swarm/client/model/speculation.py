"""`generate(draft=...)`: transformers prepares the call, `StreamDecoder` generates with guesses by drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from swarm.client.chain.prompt_chunks import chunk_overhead
from swarm.client.model.generation_loop import LoopCall, ModelForward
from swarm.client.model.train_exits import read_hidden
from swarm.client.session import StepUnderWay
from swarm.client.speculation.drafts import CopyDraft, Draft, DraftSource, HeadDraft, ModelDraft
from swarm.client.speculation.stream_decoder import MAX_GROUP, StreamDecoder
from swarm.client.threads.compute_lock import shared_with_no_lane
from swarm.errors import UsageError
from swarm.models.cutting.families import has_states
from swarm.models.exits.direct_reading import DirectReading
from swarm.models.rope_lengths import has_dynamic_rope

DraftChoice = str | nn.Module | DraftSource
"""What `generate(draft=...)` takes: "copies", "head", a causal language model of transformers, or what makes a `Draft`.
"""


def draft_sources(model: Any, choice: DraftChoice | Sequence[DraftChoice] | None) -> list[DraftSource]:
    """What makes the drafts of each text of a distributed model, in the order in which they are asked; none for None.

    Raises:
        UsageError: a choice is none of those that are possible.
    """
    if choice is None:
        return []
    choices = list(choice) if isinstance(choice, Sequence) and not isinstance(choice, str) else [choice]
    return [_source(model, one) for one in choices]


def _source(model: Any, choice: Any) -> DraftSource:
    if choice == "copies":
        return CopyDraft
    if choice == "head":
        if model.draft_head is None:
            raise UsageError("draft='head' needs a draft head; call model.train_draft or model.load_draft first")
        read = DirectReading(lambda hidden_11H: read_hidden(model, hidden_11H)[:, -1], shared_with_no_lane)
        return partial(HeadDraft, model.draft_head, model.get_input_embeddings(), read)
    if isinstance(choice, nn.Module):
        if hasattr(choice, "remote_layer"):
            raise UsageError(
                "a draft has to run at this client, because each of its tokens would cost a round trip; load a small "
                "model with from_pretrained of transformers"
            )
        return partial(ModelDraft, choice)
    if callable(choice):
        return choice  # type: ignore[no-any-return]
    raise UsageError(
        f"draft={choice!r} is neither 'copies' nor 'head', nor a model of transformers, nor a function without "
        "arguments that returns a Draft"
    )


def assisted_draft(config: Any, assistant_model: Any) -> Any:
    """The choice of a call that uses transformers' own arguments.

    Args:
        config: transformers' settings of the call.

    Raises:
        UsageError: the guesses would come from hidden states inside the model.
    """
    inside = [name for name in ("assistant_early_exit", "use_mtp", "speculation_type") if getattr(config, name, None)]
    if inside:
        raise UsageError(
            f"{inside[0]} drafts from hidden states inside the model, which are not at this client; use a small "
            "assistant_model, or prompt_lookup_num_tokens"
        )
    return "copies" if config.prompt_lookup_num_tokens is not None else assistant_model


def generate_with_drafts(model: Any, drafts: Sequence[Draft], call: LoopCall) -> Any:
    """The text with what follows it.

    Raises:
        UsageError: the call has several texts in one session.
    """
    session, tokens_1T = call.session, call.tokens_RT
    if len(tokens_1T) > 1:
        raise UsageError(
            "with a draft, each text of a batch needs a session of its own, because other guesses stand in each; leave "
            "session and past_key_values out"
        )
    mask_1T = call.arguments.get("attention_mask")
    mask_1T = mask_1T[:, -tokens_1T.shape[1] :] if mask_1T is not None else None
    known = session.position
    logits_1V, forward = _computed_prompt(model, drafts, call, mask_1T)
    limits = [call.max_length - 1] + ([] if session.grows else [session.max_length])
    padding = 0 if mask_1T is None else int((mask_1T == 0).sum())
    decoder = StreamDecoder(
        drafts,
        session,
        _OneText(forward, session.rope_limit),
        call.sampling,
        call.process,
        call.output,
        model.swarm.blocks,
        chunk_overhead([hop.server for hop in session.open().hops]),
        model._guess_memory,
        guess_room(min(limits), session.rope_limit, padding, has_dynamic_rope(model.config)),
        # Servers go back behind the last step of several tokens only by computing all again (decision 45).
        1 if has_states(model.config) else MAX_GROUP,
    )
    return call.result(decoder.generate(tokens_1T, mask_1T, logits_1V, session.position - known))


def _computed_prompt(
    model: Any, drafts: Sequence[Draft], call: LoopCall, mask_1T: torch.Tensor | None
) -> tuple[torch.Tensor, ModelForward]:
    """`LoopCall.prefill`. Drafts are told the hidden states that are computed for it."""
    answers = list[torch.Tensor]()
    with model.remote_layer.heard(answers.append):
        logits_1V, forward = call.prefill(model)
    real_T = torch.ones_like(call.tokens_RT[0], dtype=torch.bool) if mask_1T is None else mask_1T[0].bool()
    hidden_NH = torch.cat(answers, 1)[0, -len(real_T) :]  # without virtual tokens
    hidden_NH = hidden_NH[real_T[-len(hidden_NH) :].to(hidden_NH.device)]
    for draft in drafts:
        draft.observe(int(real_T.sum()) - len(hidden_NH), hidden_NH)
    return logits_1V, forward


def guess_room(limit: int, rope_limit: int | None, padding: int, has_dynamic_rope: bool) -> Callable[[int], int]:
    """How many tokens a text of so many may have with guesses behind.

    The model's own token follows the last guess, so guesses beyond the limit cannot be used, but servers would have to
    reserve cache space for them. Nor do guesses change the rotary frequencies that the tokens before them would have
    without.
    """

    def room(length: int) -> int:
        if rope_limit is not None and (length - padding <= rope_limit or has_dynamic_rope):
            return min(limit, rope_limit + padding)
        return limit

    return room


class _OneText:
    """A model's forward as `StreamDecoder` uses it."""

    def __init__(self, forward: ModelForward, rope_limit: int | None) -> None:
        self._forward, self._rope_limit = forward, rope_limit
        self.compute = forward.compute

    def send(self, tokens_1T: torch.Tensor, count: int, waits: bool) -> StepUnderWay:
        # No server computes a guess before steps that clients wait for.
        return self._forward.send(tokens_1T, None, None if waits else 0, count)

    def begins_again(self, length: int) -> bool:
        return self._rope_limit is not None and length == self._rope_limit + 1

    def logits(self, hidden_1NH: torch.Tensor) -> torch.Tensor:
        return self._forward.logits(hidden_1NH[0].unsqueeze(1))
