"""Loading a span: the tensors of some blocks, in the family's own model cut to these blocks."""

from __future__ import annotations

import torch

from swarm.common import console
from swarm.data_structures import Span
from swarm.models.block_loading import load_block, return_freed_memory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import LayoutRequest, choose_layout
from swarm.models.loading.span_assembly import SpanAssembly
from swarm.models.weights import frozen_linear, quantization


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

    Peak memory is that of the loaded span plus one block in `dtype`.

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
    path = checkpoint.structure.layers_path
    assembly = SpanAssembly(checkpoint, span)
    digests: list[str] = []
    doing = "Loading" if quant == quantization.NONE else f"Quantizing to {quant}:"
    title = f"{doing} blocks {span}" if progress else None
    for block in console.iterate_with_progress(range(span.start, span.end), title, "block"):
        model, digest = load_block(checkpoint, block, dtype)
        quantization.quantize(model.get_submodule(path), quant, device)
        # On a CPU, this affects the modules that were not quantized.
        frozen_linear.prepack(model.to(device).get_submodule(path))
        digests.append(digest)
        return_freed_memory()
        assembly.append(model)
    loaded = SpanModel(assembly.finish(), span, digests, checkpoint.config.hidden_size)
    return choose_layout(loaded, layout)
