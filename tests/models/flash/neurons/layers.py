"""Small feed-forward layers with exact zeros, sparse layers over their records, and what they should compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.flash.block_plan import BlockPlan, take_out
from swarm.models.flash.neurons.active_window import ForwardTokens
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward
from swarm.models.flash.neurons.predictor import NeuronPredictor
from swarm.models.flash.neurons.sparse_feed_forward import (
    SlabMemory,
    SpanShared,
    SparseFeedForward,
    SparseOptions,
    attach,
)
from swarm.models.flash.records import WeightStore

HIDDEN, NEURONS = 16, 40


class FeedForward(nn.Module):
    def __init__(self, gated: bool, activation: nn.Module, bias: bool, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, NEURONS, bias)
        self.gate = nn.Linear(hidden, NEURONS, bias) if gated else None
        self.act = activation
        self.down = nn.Linear(NEURONS, hidden, bias)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate(hidden)) * self.up(hidden) if self.gate else self.act(self.up(hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.values(hidden))


class SeededPredictor:
    """Selects neurons at random, but the same for the same token."""

    memory_bytes = 0

    def __init__(self, share: float) -> None:
        self.share = share
        self.noise = torch.randn(HIDDEN, NEURONS, generator=torch.Generator().manual_seed(5))

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return ((hidden_TH.float() @ self.noise).sin() * 1000).frac().abs() < self.share


def relu2() -> nn.Module:
    class SquaredReLU(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.relu(values).square()

    return SquaredReLU()


@dataclass
class Case:
    """A layer as it was, the same one over records, and the store of these."""

    dense: FeedForward
    module: nn.Module
    sparse: SparseFeedForward
    store: WeightStore


def store_for(dense: nn.Module, plan: BlockPlan, dtype: torch.dtype = torch.float32) -> MemoryStore:
    tensors = {name: dense.state_dict()[name] for name in plan.axes}
    layout = plan.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    return MemoryStore(layout, tensors)


def make_case(
    dense: FeedForward,
    predictor: NeuronPredictor,
    options: SparseOptions,
    *,
    store: WeightStore | None = None,
    tokens: ForwardTokens | None = None,
    slab_records: int = 7,
) -> Case:
    plan = find_sparse_feed_forward(dense)
    assert plan is not None
    store = store or store_for(dense, plan, dense.up.weight.dtype)
    module = FeedForward(dense.gate is not None, dense.act, dense.up.bias is not None, dense.up.in_features)
    module.to(dense.up.weight.dtype)
    taken = take_out(module, plan)
    resident = {name: dense.state_dict()[name] for name in plan.resident}
    shared = SpanShared(SlabMemory(slab_records * store.layout.stride), tokens or ForwardTokens())
    return Case(dense, module, attach(module, plan, taken, resident, predictor, store, options, shared), store)


def expected_with(dense: FeedForward, hidden: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """What the dense layer computes if the neurons that were not selected are zero."""
    return dense.down(dense.values(hidden).masked_fill(~selected, 0))
