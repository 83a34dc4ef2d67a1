"""What happens around each forward of the client's model: the remote layer learns what no layer sees, and virtual
tokens go in front of the rows and are left out of what comes back.

Everything outside of these hooks (the caller, `generate`, the heads) knows the caller's tokens only; everything inside
(the family's base model, sessions, servers) sees the virtual ones as well.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn

from swarm.client.remote_sequential import ForwardCall, RemoteLayer
from swarm.client.tuning.prompted_cache import PromptedCache
from swarm.client.tuning.virtual_tokens import VirtualTokenLayout, virtual_token_layout
from swarm.errors import UsageError
from swarm.models.placeholder_cache import PlaceholderCache


class ForwardHooks:
    """The hooks of one model.

    Args:
        model: the whole model; its `prompts`, if it has any, are the embeddings of the virtual tokens.
        owner: the module in it that calls the layer.
        layer: stands for all blocks.
    """

    def __init__(self, model: Any, owner: nn.Module, layer: RemoteLayer) -> None:
        self._model, self._layer = model, layer
        self._signature = inspect.signature(owner.forward)
        self._whole = inspect.signature(model.forward)
        self._running = _ForwardState()
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        if model is not owner and "labels" in self._whole.parameters and model.can_generate():
            model.register_forward_pre_hook(self._before_whole, with_kwargs=True)
            model.register_forward_hook(self._after_whole, with_kwargs=True, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = _by_name(self._signature, args, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache"):
            # A hand-written loop: out = model(ids, use_cache=True), then model(next, past_key_values=out...).
            limit = getattr(self._model.config, "max_position_embeddings", None) or 2048
            cache = self._model.inference_session(max_length=min(limit, 2048)).cache
            kwargs = {**kwargs, "past_key_values": cache}
        if cache is not None and not isinstance(cache, PlaceholderCache):
            raise UsageError(
                f"a {type(cache).__name__} cannot hold what remote servers compute; leave past_key_values out, or "
                "use model.inference_session()"
            )
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise UsageError(
                    f"{name}: what is inside of the blocks stays on servers; hidden states between blocks are the "
                    "outputs of model.remote_blocks[:n]"
                )
        mask = kwargs.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise UsageError("the swarm takes attention masks of shape [rows, tokens] only")
        tokens = kwargs.get("input_ids")
        kwargs, tokens = self._with_virtual_tokens(kwargs, tokens, cache)
        session = cache.session if cache is not None else None
        positioned = "position_ids" in self._signature.parameters
        self._layer.expect(
            ForwardCall(session, kwargs.get("attention_mask"), kwargs.get("position_ids"), positioned, tokens)
        )
        if self._running.cache is not None:
            self._running.cache.is_inside = True
        return (), kwargs

    def _with_virtual_tokens(self, kwargs: dict[str, Any], tokens: Any, cache: Any) -> tuple[dict[str, Any], Any]:
        """The arguments with virtual tokens, and the token ids that a session remembers."""
        running = self._running
        running.inserted, running.cache = 0, None
        prompts = self._model.prompts
        if isinstance(cache, PromptedCache):
            running.cache = cache
            if cache.placement is not None:
                return _continued(kwargs, cache.placement, cache.length), tokens
            if cache.prompts is None:
                cache.prompts = prompts.detach().clone()
            prompts = cache.prompts
        if prompts is None or (cache is not None and running.cache is None):
            return kwargs, tokens
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = self._model.get_input_embeddings()(tokens)
        mask = kwargs.get("attention_mask")
        where = virtual_token_layout(len(prompts), len(embeddings), mask)
        if running.cache is not None:
            running.cache.place(where)
        running.inserted = where.count
        kwargs = {**kwargs, "input_ids": None, "inputs_embeds": where.extended(embeddings, prompts)}
        if mask is not None:
            kwargs["attention_mask"] = where.extended(mask, mask.new_ones(where.count))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = where.positions(kwargs["position_ids"])
        if kwargs.get("token_type_ids") is not None:
            types = kwargs["token_type_ids"]
            kwargs["token_type_ids"] = where.extended(types, types.new_zeros(where.count))
        return kwargs, where.extended(tokens, tokens.new_zeros(where.count)) if tokens is not None else None

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Leave the virtual tokens out, unless the loss needs the last of them, which predicts the first token."""
        running = self._running
        if running.cache is not None:
            running.cache.is_inside = False
        inserted, running.inserted, running.cache = running.inserted, 0, None
        if output is None or not inserted or running.has_labels:
            return output
        return _without(output, inserted)

    def _before_whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = _by_name(self._whole, args, kwargs)
        labels, cache = kwargs.get("labels"), kwargs.get("past_key_values")
        prompts = self._model.prompts
        self._running.has_labels = False
        if prompts is not None and labels is not None and (cache is None or not cache.get_seq_length()):
            self._running.has_labels = True
            mask = kwargs.get("attention_mask")
            kwargs = {**kwargs, "labels": virtual_token_layout(len(prompts), len(labels), mask).labels(labels, mask)}
        return (), kwargs

    def _after_whole(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        had_labels, self._running.has_labels = self._running.has_labels, False
        if output is None or not had_labels:
            return output
        return _without(output, kwargs["labels"].shape[1] - self._slots(kwargs))

    @staticmethod
    def _slots(kwargs: dict[str, Any]) -> int:
        given = kwargs.get("input_ids")
        return int((given if given is not None else kwargs["inputs_embeds"]).shape[1])


class _ForwardState(threading.local):
    """Of the forward that runs in this thread.

    Attributes:
        inserted: virtual tokens that it put in front of the rows.
        cache: the session's, if the rows have virtual tokens.
        has_labels: whether a loss is computed of all slots.
    """

    inserted: int = 0
    cache: PromptedCache | None = None
    has_labels: bool = False


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    bound = signature.bind_partial(*args, **kwargs)
    named = dict(bound.arguments)
    rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), None)
    return {**named, **named.pop(rest, {})} if rest is not None else named


def _continued(kwargs: dict[str, Any], where: VirtualTokenLayout, past: int) -> dict[str, Any]:
    """The arguments of a step behind the one that brought the virtual tokens."""
    kwargs = dict(kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        kwargs["attention_mask"] = where.extended(mask, mask.new_ones(where.count))
    if positions is not None:
        kwargs["position_ids"] = positions + where.count
    return kwargs


def _without(output: Any, count: int) -> Any:
    """What a model returned, without the first `count` slots."""
    if isinstance(output, torch.Tensor):
        return output[:, count:] if output.ndim == 3 else output
    if isinstance(output, tuple):
        return type(output)(_without(one, count) for one in output)
    if hasattr(output, "to_tuple"):
        for name in ("last_hidden_state", "logits", "hidden_states"):
            if output.get(name) is not None:
                output[name] = _without(output[name], count)
    return output


def extended_tokens(
    count: int, tokens: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and mask of a prompt as a session remembers them."""
    where = virtual_token_layout(count, len(tokens), mask)
    with_virtual = where.extended(tokens, tokens.new_zeros(count))
    return with_virtual, where.extended(mask, mask.new_ones(count)) if mask is not None else None
