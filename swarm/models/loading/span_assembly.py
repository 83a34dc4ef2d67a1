"""Putting blocks that were loaded one by one into one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting import cut_layers
from swarm.models.execution.hooked_module import HookedModule


class SpanAssembly:
    """The model of a span while its blocks are being loaded, in order."""

    def __init__(self, checkpoint: Checkpoint, span: Span) -> None:
        self._checkpoint, self._span = checkpoint, span
        self._path = checkpoint.structure.layers_path
        self._whole: Any = None

    def append(self, model: Any) -> None:
        """Add the one block of `model`, which has the config of the whole model (`block_loading`)."""
        if self._whole is None:
            self._whole = model
        else:
            layers = self._whole.get_submodule(self._path)
            layers.extend(_with_config(model.get_submodule(self._path), model.config, self._whole.config))

    def finish(self) -> HookedModule:
        """The model cut to the span."""
        cut_layers.renumber_layers(self._whole.get_submodule(self._path))
        # Only after loading, which fills rotary tables for the layer types of the whole model.
        cut_layers.slice_config(self._whole.config, self._span, self._checkpoint.blocks)
        return HookedModule(self._whole, self._path)


def _with_config(layers: Any, old: Any, new: Any) -> Iterator[nn.Module]:
    """The layers, with their references to the config `old` replaced by `new`."""
    for layer in layers:
        for module in layer.modules():
            for name, value in vars(module).items():
                if value is old:
                    setattr(module, name, new)
        yield layer
