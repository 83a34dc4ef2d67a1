"""The family's model cut down to a span: hidden states go in at its first layer and come out at its last.

The family's own forward computes masks, position embeddings and per-layer arguments. Whatever it does before the first
layer and after the last one (embedding scale, learned positions, final norm) has no effect here: the client does it.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from swarm.models.attention.multi_session_attention import AttentionSwitch
from swarm.models.cutting import cut_layers
from swarm.models.rope_lengths import RopeLengths


class HookedModule:
    """The cut transformers model, with hooks that replace what its layers receive and take what they produce.

    Args:
        module: the cut model.
        path: where its list of layers is, such as "layers".
        first: place of its first layer among those that the weights were loaded for.
        attention, rope: shared by all models around the same layers; None for a model that was just loaded.

    Attributes:
        takes_positions: whether the forward accepts `position_ids`.
        positions: how many positions the model's tables hold, or None if it computes any position.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        first: int = 0,
        attention: AttentionSwitch | None = None,
        rope: RopeLengths | None = None,
    ) -> None:
        self.module = module
        self.first = first
        self.attention = attention or AttentionSwitch(module)
        self.rope = rope or RopeLengths(module)
        self.takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        self.positions = _table_length(module)
        self._path = path

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks' own modules."""
        layers: Any = self.module.get_submodule(self._path)
        return cast(nn.ModuleList, layers)

    def narrowed(self, start: int, end: int) -> HookedModule:
        """The model around the layers [start, end) of this one. It shares their weights."""
        module = cut_layers.slice_model(self.module, self._path, start, end)
        self.attention.include_model(module)
        return HookedModule(module, self._path, self.first + start, self.attention, self.rope)

    def run(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Run the family's forward with `hidden` in front of the first layer; what the last layer returns.

        In the dtype of `hidden`: between their own layers, some families add up in float32.
        """
        produced: list[torch.Tensor] = []

        def replace_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_hidden_states(hidden, args, kwargs)

        def take_output(module: nn.Module, args: Any, output: Any) -> None:
            produced.append((output[0] if isinstance(output, tuple) else output).to(hidden.dtype))

        # Only meanwhile: the layers belong to wider and narrower spans too. Before hooks that add to a layer's inputs.
        layers = self.layers
        enter = layers[0].register_forward_pre_hook(replace_input, with_kwargs=True, prepend=True)
        leave = layers[-1].register_forward_hook(take_output)
        try:
            self.module(**arguments)
        finally:
            enter.remove()
            leave.remove()
        return produced[-1]


def with_hidden_states(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with other hidden states, which families pass first or by name."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _table_length(model: Any) -> int | None:
    """Length of a table that the model indexes by position (such as GPT-J's sines), if it has one."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        for value in (*vars(module).values(), *module.buffers(recurse=False)):
            if isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[0] == limit:
                return limit
    return None
