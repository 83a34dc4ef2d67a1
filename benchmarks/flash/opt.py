"""Blocks of OPT-6.7B with random weights, for the benchmarks of weights on flash: dense, read whole, or sparse.

Which neurons a token needs is planted: the low-rank predictor computes its scores, and then the planted neurons take
the place of those that it would select. A bias makes as many of the selected neurons truly active as was measured.
Dense blocks compute all neurons, whatever is planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import OPTConfig
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from benchmarks.flash.files import OPT, SCALE, OptShape, write_random
from benchmarks.flash.memory_store import MemoryStore
from benchmarks.flash.planted import PlantedLayer, PlantedNeurons
from swarm.models.flash.block_plan import BlockPlan, take_out
from swarm.models.flash.neurons.active_window import ForwardTokens
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward
from swarm.models.flash.neurons.predictor import LowRankPredictor
from swarm.models.flash.neurons.sparse_feed_forward import (
    SlabMemory,
    SpanShared,
    SparseFeedForward,
    SparseOptions,
    attach,
)
from swarm.models.flash.reading import FlashStore
from swarm.models.flash.records import RecordBuffer, WeightStore
from swarm.models.weights.frozen_linear import prepack

RANK = 240
"""Mean rank of OPT-6.7B's predictors (appendix B.3)."""


def _plan() -> BlockPlan:
    small = OPTConfig(
        hidden_size=64, ffn_dim=128, num_attention_heads=2, num_hidden_layers=1, attn_implementation="sdpa"
    )
    plan = find_sparse_feed_forward(OPTDecoderLayer(small, 0).eval())
    assert plan is not None
    return plan


PLAN = _plan()
"""Of every block of OPT, whatever its size."""


class PlantedPredictor:
    """A low-rank predictor whose scores are computed, and whose selection is planted.

    Attributes:
        token: the next token's number.
    """

    def __init__(self, layer: PlantedLayer, hidden: int, dtype: torch.dtype) -> None:
        neurons, rank = len(layer.probabilities), min(RANK, hidden // 2)
        first, second = torch.randn(rank, hidden).to(dtype), torch.randn(neurons, rank).to(dtype)
        self.token = 0
        self._computed = LowRankPredictor(first, second, torch.zeros(neurons, dtype=dtype), 0.0)
        self._layer = layer
        self._drawn: dict[int, torch.Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return self._computed.memory_bytes

    def draw(self, first: int, count: int) -> None:
        """Draw tokens before they are timed."""
        for token in range(first, first + count):
            selected_N = torch.zeros(len(self._layer.probabilities), dtype=torch.bool)
            selected_N[torch.from_numpy(self._layer.selected(token))] = True
            self._drawn[token] = selected_N

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        self._computed.select(hidden_TH)
        tokens = range(self.token, self.token + len(hidden_TH))
        self.token = tokens.stop
        return torch.stack([self._drawn.pop(token) for token in tokens])


@dataclass
class OptFiles:
    """One block on the drive.

    Attributes:
        whole: all matrices in one record.
        bundled: its neurons.
        planted: which of them tokens need.
    """

    whole: FlashStore
    bundled: FlashStore
    planted: PlantedLayer


def open_files(folder: Path, dtype: torch.dtype, count: int, planted: PlantedNeurons) -> list[OptFiles]:
    """Write the files of `count` blocks, unless they are there, and open them."""
    found = []
    for number in range(count):
        stores = []
        for name, layout in (("whole", OPT.whole(dtype)), ("bundled", OPT.bundled(dtype))):
            path = folder / f"{number}-{name}-{dtype.itemsize}.bin"
            if not path.exists():
                write_random(path, layout, seed=number)
            stores.append(FlashStore.open(path, layout))
        found.append(OptFiles(*stores, planted.draw(OPT.neurons, seed=number)))
    return found


def empty_block(number: int, dtype: torch.dtype, active: float, shape: OptShape = OPT) -> OPTDecoderLayer:
    """A block on the meta device, but for norms and biases.

    Args:
        active: share of the selected neurons that are to be active.
    """
    config = OPTConfig(
        hidden_size=shape.hidden,
        ffn_dim=shape.neurons,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        attn_implementation="sdpa",
        dropout=0.0,
    )
    with torch.device("meta"):
        block = OPTDecoderLayer(config, number).to(dtype).eval().requires_grad_(False)
    for name, parameter in list(block.named_parameters()):
        if parameter.ndim == 1:
            value = 1.0 if name.endswith("norm.weight") else 0.0
            _set(block, name, torch.full(parameter.shape, value, dtype=dtype))
    # Inputs of the layer are normalized, so its sums are normally distributed.
    deviation = SCALE * shape.hidden**0.5
    _set(block, "fc1.bias", torch.full((shape.neurons,), deviation * NormalDist().inv_cdf(active), dtype=dtype))
    return block


def bound_block(number: int, buffer: RecordBuffer, active: float = 0.5) -> nn.Module:
    """A block whose matrices are those of the only record in `buffer`."""
    block = empty_block(number, buffer.layout.dtype, active)
    for field in buffer.layout.fields:
        _set(block, field.tensor, buffer.field(field.tensor)[0])
    return block


def attention_block(number: int, dtype: torch.dtype) -> nn.Module:
    """A block of which nothing but attention is in memory."""
    block = empty_block(number, dtype, 0.5)
    for name, size in OPT.attention.items():
        _set(block, name, (torch.randn(size) * SCALE).to(dtype))
    prepack(block.self_attn)
    return block


def dense_block(number: int, files: OptFiles, active: float) -> nn.Module:
    """A block in memory, as a server holds it."""
    layout = files.whole.layout
    buffer = RecordBuffer(layout, 1)
    files.whole.read(np.zeros(1, dtype=np.int64), buffer, np.zeros(1, dtype=np.int64)).wait()
    block = bound_block(number, buffer, active)
    prepack(block)
    return block


@dataclass
class SparseBlocks:
    """Blocks whose attention is in memory and whose neurons are read from stores."""

    blocks: list[nn.Module]
    layers: list[SparseFeedForward]
    predictors: list[PlantedPredictor]

    @property
    def memory_bytes(self) -> int:
        return sum(layer.memory_bytes for layer in self.layers)

    def draw(self, tokens: int) -> None:
        """Draw the next tokens of all blocks, before they are timed."""
        for predictor in self.predictors:
            predictor.draw(predictor.token, tokens)


def sparse_blocks(
    attention: Sequence[nn.Module],
    planted: Sequence[PlantedLayer],
    stores: Sequence[WeightStore],
    options: SparseOptions,
    shape: OptShape = OPT,
) -> SparseBlocks:
    """Blocks that share the attention of others, and read their neurons from stores."""
    shared = SpanShared(SlabMemory(), ForwardTokens())
    found = SparseBlocks([], [], [])
    for number, (other, layer, store) in enumerate(zip(attention, planted, stores, strict=True)):
        dtype = store.layout.dtype
        block: Any = empty_block(number, dtype, layer.active, shape)
        resident = {name: block.get_parameter(name) for name in PLAN.resident}
        taken = take_out(block, PLAN)
        block.self_attn = other.self_attn
        predictor = PlantedPredictor(layer, shape.hidden, dtype)
        found.layers.append(attach(block, PLAN, taken, resident, predictor, store, options, shared))
        found.blocks.append(block)
        found.predictors.append(predictor)
    return found


def in_memory(files: OptFiles) -> MemoryStore:
    """The neurons of a block, all in memory."""
    layout = files.bundled.layout
    buffer = RecordBuffer(layout, layout.count)
    every = np.arange(layout.count)
    files.bundled.read(every, buffer, every).wait()
    tensors = {field.tensor: buffer.field(field.tensor).movedim(0, field.axis or 0) for field in layout.fields}
    return MemoryStore(layout, tensors)


def _set(block: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    block.get_submodule(path)._parameters[own] = nn.Parameter(tensor, requires_grad=False)
