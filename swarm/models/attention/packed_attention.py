"""Attention over packed tokens: one forward of the family's layers for tokens of many rows of many sessions.

The layers see a batch of single tokens `[tokens, 1, hidden]`, as in any decode step, so everything but attention is the
family's own code on one big product. transformers lets attention and masks be exchanged (`AttentionInterface`,
`AttentionMaskInterface`); ours finds each token's row, writes its keys and values there, and lets it see what the
family's own mask function allows.

Where keys and values are kept is the batch's business: in stores of rows (`row_attention`) or in pages of a pool
(`page_attention`). The layers hand on neither batch nor cache to the attention function, so the batch in progress is
kept by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

PACKED_IMPLEMENTATION = "swarm_packed"
"""The attention implementation, as the models' configs name it."""

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]

ExpandKV = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Makes keys and values of what the cache holds."""


class PackingUnsupported(Exception):
    """The family's layers do something between cache and attention that packed tokens cannot follow."""


class PackedBatch(Cache):
    """What the layers get in the place of a cache. How keys and values are kept, and attention computed, is left open.

    Args:
        longest: positions that the longest of the batch's rows will have.
    """

    def __init__(self, longest: int = 1) -> None:
        super().__init__(layers=[])
        self._longest = longest
        self._handed_on: torch.Tensor | None = None
        self._open = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._longest - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._longest, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[tokens, heads, 1, dim]`, and return just that: attention takes the whole past from where it is."""
        self._open += 1
        self.write_kv(layer_idx, key_states, value_states)
        self._handed_on = key_states
        return key_states, value_states

    def attend(
        self,
        module: Any,
        query_NH1D: torch.Tensor,
        keys: torch.Tensor | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        """Attention of all tokens, `[tokens, 1, heads, width]`.

        Args:
            module: the family's attention.
            keys: as the layer hands them to attention, which must be as they were written.

        Raises `PackingUnsupported`.
        """
        self._open -= 1
        # With `expand_kv` the cache holds what keys and values are computed from (DeepSeek's latents).
        expand = getattr(module, "expand_kv", None)
        if expand is None and keys is not self._handed_on:
            raise PackingUnsupported("the layers change keys on their way to attention, or share them between layers")
        return self.compute_attention(query_NH1D, expand, width, mask, scale, extra)

    def require_attention_called(self) -> None:
        """Raise `PackingUnsupported` if a layer computed its attention without us."""
        if self._open or self._handed_on is None:
            raise PackingUnsupported(
                "the layers bypass transformers' AttentionInterface, so packed tokens cannot be computed"
            )

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        """Put a layer's new keys and values where they belong."""
        raise NotImplementedError

    def compute_attention(
        self,
        query_NH1D: torch.Tensor,
        expand: ExpandKV | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        """Attention of all tokens over what was written, now and before; see `attend`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The family's own rule for which slot a token may see, in the place of a tensor."""

    function: MaskFunction

    @property
    def causal(self) -> bool:
        """Whether it is the ordinary rule: everything up to the token itself."""
        return self.function is causal_mask_function


@dataclass(frozen=True, slots=True)
class AttentionExtras:
    """What some families add to attention: soft-capped scores, a learned sink for each head."""

    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


_running = threading.local()


def current_batch() -> PackedBatch:
    """What this thread is running. Raises `PackingUnsupported` if it is nothing."""
    batch: PackedBatch | None = getattr(_running, "batch", None)
    if batch is None:
        raise PackingUnsupported("the layers call attention outside of a forward over packed tokens")
    return batch


class running_batch:
    """`with running(batch):` the layers that this thread runs belong to `batch`."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        _running.batch = self._batch

    def __exit__(self, *error: object) -> None:
        _running.batch = None


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls, on `[tokens, heads, 1, dim]`."""
    if not isinstance(attention_mask, PackedMask) or query.shape[2] != 1:
        raise PackingUnsupported("the layers call attention in a way of their own")
    extra = AttentionExtras(kwargs.get("softcap"), kwargs.get("s_aux"))
    return current_batch().attend(module, query, key, value.shape[-1], attention_mask, scaling, extra), None


def _mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> PackedMask:
    """The mask function that transformers calls, once for each kind of layer."""
    return PackedMask(mask_function)


AttentionInterface.register(PACKED_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(PACKED_IMPLEMENTATION, cast(Any, _mask))
