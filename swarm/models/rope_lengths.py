"""Rotary frequencies that depend on how long a text is: longrope and dynamic NTK scaling.

transformers chooses such frequencies once a forward, by its largest position. A forward here computes tokens of many
texts, and a text comes in chunks and is replayed in others. So each token has a length of its own: that of its text as
the forward saw it in which transformers would compute the token. Steps carry it where it matters
(`StepLayout.rope_lengths`), and `RopeLengths` has the family's own rotary module compute the tokens of each length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from swarm.data_structures import StepLayout


def rope_limit(config: Any) -> int | None:
    """How long texts are, in tokens, whose rotary frequencies do not depend on their length; None for any length."""
    return min(_limits(config).values(), default=None)


def has_dynamic_rope(config: Any) -> bool:
    """Whether the frequencies change with every token beyond `rope_limit`, and not just once."""
    return any(kind != "longrope" for kind, _ in _limits(config))


def _limits(config: Any) -> dict[tuple[str, str], int]:
    """The limits of a model by kind of rotary frequencies and by type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found: dict[tuple[str, str], int] = {}
    for layers, one in (("", parameters), *parameters.items()):
        kind = one.get("rope_type") if isinstance(one, Mapping) else None
        if kind == "longrope":
            found[kind, layers] = one.get("original_max_position_embeddings") or config.max_position_embeddings
        elif isinstance(kind, str) and "dynamic" in kind:
            found[kind, layers] = config.max_position_embeddings
    return found


class RopeLengths:
    """The rotary modules of a model, told how long the text of each token is.

    Args:
        model: its rotary modules are patched, once for all models around the same layers.

    Attributes:
        lengths: of the text of each token in the running forward, shaped like the position ids; None if the
            frequencies of none depend on it.
    """

    def __init__(self, model: Any) -> None:
        self.lengths: torch.Tensor | None = None
        self._limit = rope_limit(model.config)
        self._is_longrope = [kind for kind, _ in _limits(model.config)] == ["longrope"]
        if self._limit is not None:
            for module in model.modules():
                if hasattr(module, "rope_type") and hasattr(module, "original_max_seq_len"):
                    module.forward = partial(self._forward, module)

    def of_steps(self, layouts: Sequence[StepLayout], device: torch.device) -> AbstractContextManager[None]:
        """A context in which a forward computes the packed tokens of some steps, one step after the other."""
        if self._limit is None:
            return nullcontext()
        rows = [row for layout in layouts for row in zip(layout.ends, layout.counts, _lengths(layout), strict=True)]
        if all(max(end, length) <= self._limit for end, _, length in rows):
            return nullcontext()
        lengths = [max(one + 1, length) for end, count, length in rows for one in range(end - count, end)]
        return self._active(torch.tensor(lengths, device=device).unsqueeze(1))

    def of_rectangle(self, positions_RT: torch.Tensor, lengths: Sequence[int] | None) -> AbstractContextManager[None]:
        """A context in which a forward computes a rectangle of tokens; `lengths` as in a `StepLayout`."""
        if self._limit is None:
            return nullcontext()
        lengths_RT = positions_RT + 1
        if lengths is not None:
            lengths_RT = lengths_RT.maximum(torch.tensor(lengths, device=positions_RT.device).unsqueeze(1))
        return self._active(lengths_RT) if bool((lengths_RT > self._limit).any()) else nullcontext()

    @contextmanager
    def _active(self, lengths: torch.Tensor) -> Iterator[None]:
        assert self._limit is not None
        self.lengths = lengths.clamp(min=self._limit, max=self._limit + 1 if self._is_longrope else None)
        try:
            yield
        finally:
            self.lengths = None

    def _forward(self, rotary: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The rotary module's forward, once for the tokens of each length."""
        forward = partial(type(rotary).forward, rotary, x)
        if self.lengths is None:  # nothing to choose, which could not be traced
            with torch.no_grad():
                return inspect.unwrap(type(rotary).forward)(rotary, x, position_ids, *args, **kwargs)
        results: list[torch.Tensor] = []
        is_tuple = True
        for length in self.lengths.unique().tolist():
            chosen = self.lengths == length
            # The last position makes it the longest of this forward.
            positions = torch.cat([position_ids[chosen], position_ids.new_tensor([length - 1])]).unsqueeze(0)
            with _state_kept(rotary):
                found = forward(positions, *args, **kwargs)
            is_tuple = isinstance(found, tuple)
            parts = found if is_tuple else (found,)
            results = results or [part.new_empty(*position_ids.shape, *part.shape[2:]) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[chosen] = part[0, :-1]
        return tuple(results) if is_tuple else results[0]


def _lengths(layout: StepLayout) -> Sequence[int]:
    return layout.rope_lengths if layout.rope_lengths is not None else (0,) * layout.sequences


@contextmanager
def _state_kept(rotary: Any) -> Iterator[None]:
    """Afterwards the module has the frequencies of short texts again. Those of dynamic scaling would only grow."""
    buffers = dict(rotary._buffers)
    rotary._buffers.update({name: one.clone() for name, one in buffers.items() if one is not None})
    lengths = {name: value for name, value in vars(rotary).items() if name.endswith("max_seq_len_cached")}
    try:
        yield
    finally:
        rotary._buffers.update(buffers)
        for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
            delattr(rotary, name)
        vars(rotary).update(lengths)
