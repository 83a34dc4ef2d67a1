"""Loading a span: the tensors of some blocks, in the family's own model cut to these blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from swarm.common import console
from swarm.data_structures import Span
from swarm.models.block_loading import load_block, return_freed_memory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.weight_places import Hold
from swarm.models.cutting import cut_layers
from swarm.models.execution.hooked_module import HookedModule
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import LayoutRequest, choose_layout
from swarm.models.weights import frozen_linear, quantization
from swarm.models.weights.packed import held


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


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = quantization.NONE,
    progress: bool = False,
    layout: LayoutRequest = "auto",
) -> SpanModel:
    """Load the tensors of `span` and nothing else.

    Peak memory is that of the loaded span plus one block in `dtype`; of packed weights, plus one block as it is stored.

    Args:
        quant: form of the weights, see `swarm.models.weights.quantization`.
        progress: whether to show progress on the terminal.
        layout: how the attention cache is laid out, see `swarm.models.execution.strategy_choice`.

    Raises:
        InvalidSpan: the span is outside the model.
        CheckpointError: weights are missing, unreadable or of the wrong shape.
        InvalidOption: this machine cannot compute with this quantization.
    """
    checkpoint.validate_span(span.start, span.end)
    quantization.require_available(quant, device)
    hold: Hold | None = None
    if quant == quantization.PACKED:
        hold = partial(held, dtype=dtype, device=device)
    path = checkpoint.structure.layers_path
    assembly = SpanAssembly(checkpoint, span)
    digests: list[str] = []
    doing = "Loading" if quant in (quantization.NONE, quantization.PACKED) else f"Quantizing to {quant}:"
    title = f"{doing} blocks {span}" if progress else None
    for block in console.iterate_with_progress(range(span.start, span.end), title, "block"):
        model, digest = load_block(checkpoint, block, dtype, hold)
        quantization.quantize(model.get_submodule(path), quant, device)
        # On a CPU, this affects the modules that were not quantized.
        frozen_linear.prepack(model.to(device).get_submodule(path))
        digests.append(digest)
        return_freed_memory()
        assembly.append(model)
    loaded = SpanModel(assembly.finish(), span, digests, checkpoint.config.hidden_size)
    return choose_layout(loaded, layout)
