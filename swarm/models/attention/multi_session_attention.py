"""Attention over packed tokens: one forward of the family's layers for tokens of many sequences of many sessions.

The layers see a batch of single tokens `[tokens, 1, hidden]`, as in any decode step, so everything but attention is the
family's own code on one big product. Where layers have a state, several tokens of a sequence come in a row of their
own, `[sequences, tokens, hidden]`, because they change the state one after the other. transformers lets attention and
masks be exchanged (`AttentionInterface`, `AttentionMaskInterface`); ours finds the sequence of each token, writes its
keys and values there, and lets it see what the family's own mask function allows.

The kind of batch decides where keys and values are kept: in contiguous stores (`contiguous_attention`) or in pages of a
pool (`paged_attention`). The layers pass neither batch nor cache to the attention function, so each thread remembers
its batch in progress.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from swarm.models.attention.sequence_states import StateBatch, StatefulCache

PACKED_IMPLEMENTATION = "swarm_packed"
"""The attention implementation, as the models' configs name it."""

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]

ExpandKV = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes keys and values from what the cache holds."""


class PackingUnsupported(Exception):
    """The family's layers do something between cache and attention that does not work with packed tokens."""


class KeysStored(Exception):
    """Ends a layer's forward when its keys and values are stored, if nothing else of it is needed."""


class PackedBatch(StatefulCache):
    """What the layers get in place of a cache. Subclasses keep keys and values, and compute attention.

    Args:
        longest: positions that the longest sequence of the batch will have.
        states: the states of the rows, for layers that have any; None if they cannot have.
    """

    def __init__(self, longest: int = 1, states: StateBatch | None = None) -> None:
        super().__init__(layers=[])
        self._longest = longest
        self._states = states
        self._stored_keys: torch.Tensor | None = None
        self._unanswered_writes = 0

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
        """Store `[rows, heads, tokens, dim]`, and return just that: attention reads the past where it is stored."""
        self._unanswered_writes += 1
        self.write_kv(layer_idx, packed_heads(key_states), packed_heads(value_states))
        self._stored_keys = key_states
        return key_states, value_states

    @property
    def states(self) -> StateBatch:
        """The states of the rows. Raises `PackingUnsupported` if there cannot be any."""
        if self._states is None:
            raise PackingUnsupported("the layers keep states, which this layout of the cache does not")
        return self._states

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
            keys: as the layer passes them to attention; they must be what was stored.

        Raises `PackingUnsupported`.
        """
        self._unanswered_writes -= 1
        # With `expand_kv` the cache holds what keys and values are computed from (DeepSeek's latents).
        expand = getattr(module, "expand_kv", None)
        if expand is None and keys is not self._stored_keys:
            raise PackingUnsupported("the layers change keys before attention, or share them between layers")
        return self.compute_attention(query_NH1D, expand, width, mask, scale, extra)

    def attend_at(
        self,
        site: AttentionSite,
        query_NH1D: torch.Tensor,
        keys_NK1D: torch.Tensor,
        values_NK1D: torch.Tensor,
        sinks: torch.Tensor | None,
        width: int,
    ) -> torch.Tensor:
        """`update` and `attend` at once."""
        self.update(keys_NK1D, values_NK1D, site.layer)
        extra = AttentionExtras(site.softcap, sinks)
        return self.attend(site.module, query_NH1D, keys_NK1D, width, site.mask, site.scale, extra)

    def finish(self, may_lack_keys: bool = False) -> None:
        """End a forward. Raises `PackingUnsupported` if a layer did not call this attention.

        Args:
            may_lack_keys: whether there may be no layer that keeps keys and values.
        """
        if self._states is not None:
            self._states.finish()
        if self._unanswered_writes or (self._stored_keys is None and not may_lack_keys):
            raise PackingUnsupported(
                "the layers bypass transformers' AttentionInterface, so packed tokens cannot be computed"
            )

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        """Store a layer's new keys and values."""
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
        """Attention of all tokens over what was stored, now and before; see `attend`."""
        raise NotImplementedError


class KeysOnlyBatch(PackedBatch):
    """The tokens of another batch, of which keys and values are stored and nothing else is computed.

    A layer's forward ends with `KeysStored` where it would compute attention.
    """

    def __init__(self, batch: PackedBatch) -> None:
        super().__init__(batch.get_seq_length() + 1)
        self._batch = batch

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        self._batch.write_kv(layer, keys_NH1D, values_NH1D)

    def compute_attention(
        self,
        query_NH1D: torch.Tensor,
        expand: ExpandKV | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        raise KeysStored


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The family's own rule for which slots a token may see, in place of a tensor."""

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


@dataclass(frozen=True)
class AttentionSite:
    """One layer's cache and attention, as the family's code called them while it was traced."""

    module: Any
    layer: int
    mask: PackedMask
    scale: float | None
    softcap: float | None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """Attention of the batch that this thread computes, for single tokens; see `PackedBatch.attend`."""
        return active_batch().attend_at(self, query, keys, values, sinks, width)


_active = threading.local()


def active_batch() -> PackedBatch:
    """The batch that this thread computes. Raises `PackingUnsupported` if there is none."""
    batch: PackedBatch | None = getattr(_active, "batch", None)
    if batch is None:
        raise PackingUnsupported("the layers call attention outside of a forward over packed tokens")
    return batch


class ActiveBatch:
    """A context in which the layers that this thread runs belong to `batch`."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        _active.batch = self._batch

    def __exit__(self, *error: object) -> None:
        _active.batch = None


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
    if not isinstance(attention_mask, PackedMask):
        raise PackingUnsupported("the layers call attention in an unknown way")
    extra = AttentionExtras(kwargs.get("softcap"), kwargs.get("s_aux"))
    output_N1HD = active_batch().attend(
        module, packed_heads(query), key, value.shape[-1], attention_mask, scaling, extra
    )
    return output_N1HD.reshape(query.shape[0], query.shape[2], *output_N1HD.shape[2:]), None


def packed_heads(tensor_RHTD: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values of rows of tokens as those of single tokens, `[rows * tokens, heads, 1, dim]`."""
    rows, heads, tokens, dim = tensor_RHTD.shape
    return tensor_RHTD if tokens == 1 else tensor_RHTD.transpose(1, 2).reshape(rows * tokens, heads, 1, dim)


def _mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> PackedMask:
    """The mask function that transformers calls, once for each kind of layer."""
    return PackedMask(mask_function)


AttentionInterface.register(PACKED_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(PACKED_IMPLEMENTATION, cast(Any, _mask))


class AttentionSwitch:
    """Sets the attention implementation in the configs of a model and its layers, where transformers looks it up.

    The parts of a span share their layers, so they share the switch. It does not keep their configs alive. The
    network loop makes parts while the compute thread switches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packed = False
        self._lock = threading.Lock()
        self._family: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """By the identity of a config: the config, unless it is gone, and its family's attention."""
        self.include_model(model)

    def include_model(self, model: nn.Module) -> None:
        """Switch the configs of this model too, now and from now on.

        A copied config says what the original said when it was copied; the layers may have been switched since.
        """
        with self._lock:
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if hasattr(config, "_attn_implementation_internal") and id(config) not in self._family:
                    current = config._attn_implementation_internal
                    family = self._first_implementation() if current == PACKED_IMPLEMENTATION else current
                    forget = partial(_forget, self._family, id(config))
                    self._family[id(config)] = weakref.ref(config, forget), family
                    config._attn_implementation_internal = PACKED_IMPLEMENTATION if self._packed else family

    def use_family_attention(self) -> None:
        """Let the layers use what their family chose."""
        if self._packed:
            with self._lock:
                self._packed = False
                for config, family in self._known():
                    config._attn_implementation_internal = family

    def use_packed_attention(self) -> None:
        """Let the layers use attention over packed tokens."""
        if not self._packed:
            with self._lock:
                self._packed = True
                for config, _ in self._known():
                    config._attn_implementation_internal = PACKED_IMPLEMENTATION

    def _known(self) -> list[tuple[Any, Any]]:
        known = [(reference(), family) for reference, family in [*self._family.values()]]
        return [(config, family) for config, family in known if config is not None]

    def _first_implementation(self) -> Any:
        return next(family for _, family in self._family.values())


def _forget(family: dict[int, tuple[weakref.ref[Any], Any]], identity: int, reference: weakref.ref[Any]) -> None:
    """Drop a config that is gone, unless another one is where it was."""
    if identity in family and family[identity][0] is reference:
        del family[identity]
