"""Hooks around each forward of the client's model: they prepare the remote layer, and insert virtual tokens.

Two modules are hooked. The owner is the module that calls the decoder layers (such as `LlamaModel`); its hooks tell the
remote layer what no layer gets (session, mask, positions, token ids), put virtual tokens in front of the sequences, and
remove them from the outputs. The whole model (such as `LlamaForCausalLM`) is hooked only because it computes the loss:
its hooks extend the labels by the virtual tokens.

Everything outside the hooks (the caller, `generate`, the heads) knows the caller's tokens only. Everything inside (the
owner, sessions, servers) sees the virtual tokens as well. See `swarm.client.model.remote_sequential` for the whole way.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn

from swarm.client.model.remote_sequential import ForwardCall, RemoteLayer
from swarm.client.tuning.virtual_tokens import PromptedCache, VirtualTokenLayout, virtual_token_layout
from swarm.client.wire.packed_hidden import packed_texts
from swarm.errors import UsageError
from swarm.models.placeholder_cache import PlaceholderCache

DEFAULT_MAX_LENGTH = 2048
"""Tokens for which a hand-written loop opens a session with `use_cache=True` at first; it grows."""


class ForwardHooks:
    """The hooks of one model.

    Args:
        model: the whole model; its `prompts`, if any, are the embeddings of the virtual tokens.
        owner: the module in it that calls the layer.
        layer: takes the place of the decoder layers.
    """

    def __init__(self, model: Any, owner: nn.Module, layer: RemoteLayer) -> None:
        self._model, self._layer = model, layer
        self._owner_signature = inspect.signature(owner.forward)
        self._model_signature = inspect.signature(model.forward)
        self._state = _ForwardState()
        owner.register_forward_pre_hook(self._before_owner, with_kwargs=True)
        owner.register_forward_hook(self._after_owner, with_kwargs=True, always_call=True)
        if model is not owner and "labels" in self._model_signature.parameters and model.can_generate():
            model.register_forward_pre_hook(self._before_model, with_kwargs=True)
            model.register_forward_hook(self._after_model, with_kwargs=True, always_call=True)

    def _before_owner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the remote layer, and insert the virtual tokens."""
        if self._layer.is_replaced:
            return args, kwargs
        kwargs = _by_name(self._owner_signature, args, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache"):
            # A hand-written loop: out = model(ids, use_cache=True), then model(next, past_key_values=out...).
            limit = getattr(self._model.config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
            session = self._model.inference_session(max_length=min(limit, DEFAULT_MAX_LENGTH))
            session.grows = True
            cache = session.cache
            cache.keep_session()
            kwargs = {**kwargs, "past_key_values": cache}
        _require_supported(kwargs, cache)
        kwargs, tokens = self._insert_images(kwargs, cache)
        kwargs, tokens = self._insert_virtual_tokens(kwargs, tokens, cache)
        session = cache.session if cache is not None else None
        takes_positions = "position_ids" in self._owner_signature.parameters
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        self._layer.prepare(ForwardCall(session, mask, positions, takes_positions, tokens))
        if self._state.cache is not None:
            self._state.cache.is_inside = True
        return (), kwargs

    def _insert_images(self, kwargs: dict[str, Any], cache: Any) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The arguments with the images of the prompt that `generate` continues, and the token ids for its history."""
        tokens, images = kwargs.get("input_ids"), self._model._active.images
        if images is None or tokens is None:
            return kwargs, tokens
        past = cache.get_seq_length() if cache is not None else 0
        placed = images.insert(tokens, past, self._model.get_input_embeddings())
        if placed is None:
            return kwargs, tokens
        return {**kwargs, "input_ids": None, "inputs_embeds": placed[0]}, placed[1]

    def _insert_virtual_tokens(
        self, kwargs: dict[str, Any], tokens: Any, cache: Any
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The arguments with virtual tokens, and the token ids for the session's history."""
        state = self._state
        state.inserted, state.cache = 0, None
        prompts = self._model.prompts
        if isinstance(cache, PromptedCache):
            state.cache = cache
            if cache.token_layout is not None:
                return _continue_after_virtual_tokens(kwargs, cache.token_layout), tokens
            if cache.prompts is None:
                cache.prompts = prompts.detach().clone()
            prompts = cache.prompts
        if prompts is None or (cache is not None and state.cache is None):
            return kwargs, tokens
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = self._model.get_input_embeddings()(tokens)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None and positions is not None and positions.ndim == 2 and packed_texts(positions):
            raise UsageError(
                "position_ids that begin again are several texts in a row, and virtual tokens would come before the "
                "first of them only; pass each text in a row of its own, or train LoRA factors instead"
            )
        layout = virtual_token_layout(len(prompts), len(embeddings), mask)
        if state.cache is not None:
            state.cache.set_token_layout(layout)
        state.inserted = layout.count
        kwargs = {**kwargs, "input_ids": None, "inputs_embeds": layout.insert(embeddings, prompts)}
        if mask is not None:
            kwargs["attention_mask"] = layout.insert(mask, mask.new_ones(layout.count))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = layout.positions(kwargs["position_ids"])
        if kwargs.get("token_type_ids") is not None:
            types = kwargs["token_type_ids"]
            kwargs["token_type_ids"] = layout.insert(types, types.new_zeros(layout.count))
        return kwargs, layout.insert(tokens, tokens.new_zeros(layout.count)) if tokens is not None else None

    def _after_owner(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Remove the virtual tokens, unless the loss needs the last of them, which predicts the first token."""
        state = self._state
        if state.cache is not None:
            state.cache.is_inside = False
        inserted, state.inserted, state.cache = state.inserted, 0, None
        if output is None or not inserted or state.has_labels:
            return output
        return _drop_first_slots(output, inserted)

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Extend the labels by the virtual tokens."""
        kwargs = _by_name(self._model_signature, args, kwargs)
        labels, cache = kwargs.get("labels"), kwargs.get("past_key_values")
        prompts = self._model.prompts
        self._state.has_labels = False
        if prompts is not None and labels is not None and (cache is None or not cache.get_seq_length()):
            self._state.has_labels = True
            mask = kwargs.get("attention_mask")
            kwargs = {**kwargs, "labels": virtual_token_layout(len(prompts), len(labels), mask).labels(labels, mask)}
        return (), kwargs

    def _after_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Remove the virtual tokens that the loss needed."""
        had_labels, self._state.has_labels = self._state.has_labels, False
        if output is None or not had_labels:
            return output
        given = kwargs.get("input_ids")
        slots = int((given if given is not None else kwargs["inputs_embeds"]).shape[1])
        return _drop_first_slots(output, kwargs["labels"].shape[1] - slots)


class _ForwardState(threading.local):
    """What the hooks of one forward in this thread tell each other.

    Attributes:
        inserted: virtual tokens in front of each sequence.
        cache: the session's cache, if its sequences begin with virtual tokens.
        has_labels: whether the model computes a loss.
    """

    inserted: int = 0
    cache: PromptedCache | None = None
    has_labels: bool = False


def _require_supported(kwargs: dict[str, Any], cache: Any) -> None:
    if cache is not None and not isinstance(cache, PlaceholderCache):
        raise UsageError(
            f"a {type(cache).__name__} cannot hold what remote servers compute; leave past_key_values out, or use "
            "model.inference_session()"
        )
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name):
            raise UsageError(
                f"{name} is not available, because servers keep it; the hidden states after the first n blocks are the "
                "output of model.remote_blocks[:n]"
            )
    if kwargs.get("pixel_values") is not None:
        raise UsageError("images are taken by model.generate only: a forward gets no pixel_values")
    mask = kwargs.get("attention_mask")
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        raise UsageError("the swarm supports only attention masks of the shape [rows, tokens]")


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments as keyword arguments."""
    if not args:
        return kwargs
    bound = signature.bind_partial(*args, **kwargs)
    named = dict(bound.arguments)
    rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), None)
    return {**named, **named.pop(rest, {})} if rest is not None else named


def _continue_after_virtual_tokens(kwargs: dict[str, Any], layout: VirtualTokenLayout) -> dict[str, Any]:
    """The arguments of a step after the one that brought the virtual tokens."""
    kwargs = dict(kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        kwargs["attention_mask"] = layout.insert(mask, mask.new_ones(layout.count))
    if positions is not None:
        kwargs["position_ids"] = positions + layout.count
    return kwargs


def _drop_first_slots(output: Any, count: int) -> Any:
    """A model's output without its first `count` slots."""
    if isinstance(output, torch.Tensor):
        return output[:, count:] if output.ndim == 3 else output
    if isinstance(output, tuple):
        return type(output)(_drop_first_slots(one, count) for one in output)
    if hasattr(output, "to_tuple"):
        for name in ("last_hidden_state", "logits", "hidden_states"):
            if output.get(name) is not None:
                output[name] = _drop_first_slots(output[name], count)
    return output


def insert_virtual_tokens(
    count: int, tokens: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and mask of a prompt with `count` virtual tokens, as a session's history holds them."""
    layout = virtual_token_layout(count, len(tokens), mask)
    extended = layout.insert(tokens, tokens.new_zeros(count))
    return extended, layout.insert(mask, mask.new_ones(count)) if mask is not None else None
