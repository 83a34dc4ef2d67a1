"""Loading a span: the tensors of some blocks, in the family's own model cut down to them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from swarm import console
from swarm.data_structures import Span
from swarm.models import families, linear, packing, quantization, surgery
from swarm.models.checkpoint import Checkpoint
from swarm.models.digest import block_digest
from swarm.models.loading import load_cut
from swarm.models.span import SpanModel


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = quantization.NONE,
    progress: bool = False,
    packed: bool = True,
) -> SpanModel:
    """Load the tensors of `span` and nothing else.

    Memory peaks at what the span takes in the end and one block in `dtype`.

    Args:
        quant: form of the weights, see `swarm.models.quantization`.
        progress: show progress on the terminal.
        packed: compute tokens of many sessions together, if the family allows.

    Raises:
        InvalidSpan: the span lies outside the model.
        CheckpointError: weights are missing, unreadable or of the wrong shape.
        InvalidOption: this machine cannot compute with weights in that form.
    """
    checkpoint.check_span(span.start, span.end)
    quantization.check_available(quant, device)
    if quant == quantization.NONE:
        model, digests = _load_blocks(checkpoint, span, dtype, f"Loading blocks {span}" if progress else None)
        linear.prepack(model.to(device).get_submodule(checkpoint.anatomy.path))
    else:
        model, digests = _load_quantized(checkpoint, span, dtype, device, quant, progress)
    # After loading, because rotary tables are filled while it happens, for the layer types of the whole model.
    surgery.slice_config(model.config, span, checkpoint.blocks)
    result = SpanModel(model, checkpoint.anatomy.path, span, digests, checkpoint.config.hidden_size)
    if packed:
        packing.decide(result)
    return result


def _load_quantized(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype, device: torch.device, form: str, progress: bool
) -> tuple[Any, list[str]]:
    """One block after the other is loaded, quantized and put behind those before it."""
    path = checkpoint.anatomy.path
    whole: Any = None
    layers: Any = nn.ModuleList()
    digests: list[str] = []
    title = f"Quantizing blocks {span} to {form}" if progress else None
    for block in console.progress(range(span.start, span.end), title, "block"):
        model, found = _load_blocks(checkpoint, Span(block, block + 1), dtype, None)
        digests += found
        quantization.quantize(model.get_submodule(path), form, device)
        linear.prepack(model.to(device).get_submodule(path))  # what has a shape that cannot be quantized
        if whole is None:
            whole, layers = model, model.get_submodule(path)
        else:
            layers.extend(_moved(model.get_submodule(path), model.config, whole.config))
    surgery.renumber(layers)
    return whole, digests


def _moved(layers: Any, old: Any, new: Any) -> Iterator[nn.Module]:
    """The layers, told that they belong to the model of another config."""
    for layer in layers:
        for module in layer.modules():
            for name, value in vars(module).items():
                if value is old:
                    setattr(module, name, new)
        yield layer


def _load_blocks(checkpoint: Checkpoint, span: Span, dtype: torch.dtype, title: str | None) -> tuple[Any, list[str]]:
    """The model cut down to `span`, on the CPU, with the config of the whole model, and a digest a block."""
    config = copy.deepcopy(checkpoint.config)
    blocks = checkpoint.blocks
    tensors, digests = _read_blocks(checkpoint, span, title)

    def cut(model: nn.Module) -> None:
        _, owner, name = surgery.find_layers(model, blocks)
        kept = getattr(owner, name)[span.start : span.end]
        setattr(owner, name, kept)
        surgery.drop_weights(owner, keep=(name,))
        surgery.renumber(kept)

    return load_cut(families.base_class(config), config, cut, tensors, dtype), digests


def _read_blocks(checkpoint: Checkpoint, span: Span, title: str | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The span's tensors, named as if the span were the whole model, and a digest a block."""
    locate, path = checkpoint.locate, checkpoint.anatomy.path
    tensors: dict[str, torch.Tensor] = {}
    by_block: dict[int, dict[str, torch.Tensor]] = {block: {} for block in range(span.start, span.end)}

    def wanted(name: str) -> bool:
        place = locate(name)
        return place is not None and place[0] in span

    for name, tensor in checkpoint.read(wanted, title):
        place = locate(name)
        assert place is not None
        block, inner = place
        by_block[block][inner] = tensor
        tensors[f"{path}.{block - span.start}.{inner}"] = tensor
    return tensors, [block_digest(by_block[block]) for block in by_block]
