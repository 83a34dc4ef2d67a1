"""Storing keys and values of tokens that skip a span, without the family's modules.

The span's forward is traced with the same hidden states in front of every layer. Of its operations, only those are kept
that keys and values follow from: norms, their products, positions. Queries, attention and feed-forward layers go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from swarm.models.attention.multi_session_attention import AttentionExtras, PackedBatch, PackedMask
from swarm.models.execution.hooked_module import with_hidden_states
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.traced_forward import TokenFill, trace_span


class _KeyRecorder(PackedBatch):
    """Stands for a batch while the forward is traced: keeps keys and values, and computes no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []
        self.stored: list[torch.Tensor] = []

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        self.layers.append(layer)
        self.stored += [keys_NH1D, values_NH1D]

    def compute_attention(
        self,
        query_NH1D: torch.Tensor,
        expand: Any,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        return query_NH1D.new_zeros(query_NH1D.shape[0], 1, query_NH1D.shape[1], width)


def traced_fill(model: SpanModel) -> TokenFill:
    """What `SpanModel.fill_tokens` does, traced. Raises errors of torch's own if the forward cannot be traced."""
    recorder = _KeyRecorder()

    def run(batch: PackedBatch, hidden_N1H: torch.Tensor, positions_N1: torch.Tensor) -> Any:
        recorder.layers, recorder.stored = [], []
        with _in_front_of_every_layer(model.layers, hidden_N1H):
            model.run_modules(batch, hidden_N1H, positions_N1)
        return tuple(recorder.stored)

    forward = trace_span(model, run, recorder).function(share=True)
    layers = tuple(recorder.layers)

    def fill(hidden_N1H: torch.Tensor, positions_N1: torch.Tensor, batch: PackedBatch) -> None:
        stored = forward(hidden_N1H, positions_N1)
        for layer, keys_NH1D, values_NH1D in zip(layers, stored[::2], stored[1::2], strict=True):
            batch.write_kv(layer, keys_NH1D, values_NH1D)

    return fill


@contextmanager
def _in_front_of_every_layer(layers: nn.ModuleList, hidden: torch.Tensor) -> Iterator[None]:
    """Meanwhile, each layer gets these hidden states instead of what the one before it returned."""

    def replace_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_hidden_states(hidden, args, kwargs)

    handles = [layer.register_forward_pre_hook(replace_input, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
