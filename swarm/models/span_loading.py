"""Loading a span: the tensors of some blocks, in the family's own model cut down to them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from swarm.data_structures import Span
from swarm.models import families, linear, packing, surgery
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
    progress: bool = False,
    packed: bool = True,
) -> SpanModel:
    """Load the tensors of `span` and nothing else.

    Args:
        packed: compute tokens of many sessions together, if the family allows.

    Raises:
        InvalidSpan: the span lies outside the model.
        CheckpointError: weights are missing, unreadable or of the wrong shape.
    """
    checkpoint.check_span(span.start, span.end)
    config = copy.deepcopy(checkpoint.config)
    blocks = checkpoint.blocks
    model_class = families.base_class(config)
    path = checkpoint.anatomy.path
    tensors, digests = _read_blocks(checkpoint, span, progress)

    def cut(model: nn.Module) -> None:
        _, owner, name = surgery.find_layers(model, blocks)
        kept = getattr(owner, name)[span.start : span.end]
        setattr(owner, name, kept)
        surgery.drop_weights(owner, keep=(name,))
        surgery.renumber(kept)

    model = load_cut(model_class, config, cut, tensors, dtype).to(device)
    del tensors  # weights take another form now, one after the other
    # After loading, because rotary tables are filled while it happens, for the layer types of the whole model.
    surgery.slice_config(model.config, span, blocks)
    linear.prepack(model.get_submodule(path))
    result = SpanModel(model, path, span, digests, config.hidden_size)
    if packed:
        packing.decide(result)
    return result


def _read_blocks(checkpoint: Checkpoint, span: Span, progress: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The span's tensors, named as if the span were the whole model, and a digest a block."""
    locate, path = checkpoint.locate, checkpoint.anatomy.path
    tensors: dict[str, torch.Tensor] = {}
    by_block: dict[int, dict[str, torch.Tensor]] = {block: {} for block in range(span.start, span.end)}

    def wanted(name: str) -> bool:
        place = locate(name)
        return place is not None and place[0] in span

    title = f"Loading blocks {span}" if progress else None
    for name, tensor in checkpoint.read(wanted, title):
        place = locate(name)
        assert place is not None
        block, inner = place
        by_block[block][inner] = tensor
        tensors[f"{path}.{block - span.start}.{inner}"] = tensor
    return tensors, [block_digest(by_block[block]) for block in by_block]
