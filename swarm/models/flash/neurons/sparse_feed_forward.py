"""A feed-forward layer that computes the neurons that its tokens need, and reads those that are not in memory.

For few tokens: predict, begin to read what is missing, compute what is there meanwhile, wait, compute what was read.
For many tokens, as of prompts, nearly every neuron is needed by some token: all are read in order and computed exactly
(`exact_pass`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from swarm.errors import DriveFailed, TrainingRefused
from swarm.models.flash.neurons.active_window import ActiveWindow, ForwardTokens, Portion
from swarm.models.flash.neurons.exact_pass import ExactPass, SlabMemory
from swarm.models.flash.neurons.feed_forward_site import ACTIVATION, DOWN, GATE, UP, put_in_place
from swarm.models.flash.neurons.neuron_counters import NeuronCounters
from swarm.models.flash.neurons.neuron_matrix import NeuronMatrix
from swarm.models.flash.neurons.neuron_products import NeuronProducts
from swarm.models.flash.neurons.predictor import NeuronPredictor
from swarm.models.flash.plans.block_plan import BlockPlan
from swarm.models.flash.records.record_buffer import Indices
from swarm.models.flash.records.weight_store import PendingRead, WeightStore

EXACT_FROM = 32
"""Tokens of a forward from which all neurons are computed: reading them in order then costs less than finding out which
are needed, and prompts are exact."""

SAMPLED_TOKENS = 4
"""The last tokens of an exact forward, with which recall is sampled."""

NOTED_TOKENS, NOTED_SHARE = 64, 1 / 4
"""The last tokens of an exact forward whose neurons are noted as needed: so many, and no more than this share of the
forward, since predicting costs up to a sixth of what computing does."""


@dataclass(frozen=True)
class SparseOptions:
    """How sparse layers compute.

    Attributes:
        capacity: neurons of one block that memory has room for.
        exact_from: tokens of a forward from which it is computed exactly.
        own_neurons_only: whether a token's result depends on the neurons predicted for it and no others, so that it is
            the same at each computation. Otherwise, as in the paper, tokens gain from what happens to be in memory.
        window_forwards: the paper's fixed window, see `ActiveWindow`.
    """

    capacity: int
    exact_from: int = EXACT_FROM
    own_neurons_only: bool = True
    window_forwards: int | None = None


@dataclass
class SpanShared:
    """What the sparse layers of a span have in common, since they compute one after the other.

    Attributes:
        slabs: memory for exact passes.
        tokens: which tokens of the forward in progress belong together.
        exactly: whether everything is computed with all neurons, whatever the number of tokens.
    """

    slabs: SlabMemory = field(default_factory=SlabMemory)
    tokens: ForwardTokens = field(default_factory=ForwardTokens)
    exactly: bool = False


class SparseFeedForward(nn.Module):
    """Computes a block's feed-forward layer, `[..., hidden]` to the same shape. Used by one thread.

    Args:
        plan: of the block.
        activation: the block's own.
        resident: the tensors of `plan.resident`, by their names.
        predictor: of the block.
        store: holds the block's records.

    Attributes:
        counters: what was selected and read.
        matrix: the neurons in memory.
    """

    def __init__(
        self,
        plan: BlockPlan,
        activation: nn.Module,
        resident: Mapping[str, torch.Tensor],
        predictor: NeuronPredictor,
        store: WeightStore,
        options: SparseOptions,
        shared: SpanShared,
    ) -> None:
        super().__init__()
        biases = {role: resident.get(f"{plan.modules[role]}.bias") for role in (UP, GATE, DOWN) if role in plan.modules}
        self._biases = {role: bias for role, bias in biases.items() if bias is not None and role != DOWN}
        self._products = NeuronProducts(plan, activation, biases[DOWN])
        self._predictor = predictor
        self._store = store
        self._options = options
        self._shared = shared
        self.counters = NeuronCounters(store.layout.count)
        self.matrix = NeuronMatrix(store.layout, min(options.capacity, store.layout.count), self._biases)
        self._rows = self._products.rows(self.matrix.buffer, {role: self.matrix.values(role) for role in self._biases})
        self._window = ActiveWindow(self.matrix, options.window_forwards)
        self._exact = ExactPass(self._products, self._biases, store, shared.slabs)

    @property
    def memory_bytes(self) -> int:
        """Memory for neurons and the predictor; that of slabs is the span's."""
        return self.matrix.buffer.nbytes + self._predictor.memory_bytes

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises `DriveFailed`, and `TrainingRefused` where gradients are asked for."""
        if hidden.requires_grad:
            raise TrainingRefused(
                "this server reads weights from flash and computes only some of them, so it has no gradients; train "
                "over servers that hold their weights in memory"
            )
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        exactly = self._shared.exactly or len(hidden_TH) >= self._options.exact_from
        result_TH = self._compute_exactly(hidden_TH) if exactly else self._compute_selected(hidden_TH)
        return result_TH.view(hidden.shape)

    def _compute_exactly(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        noted = max(SAMPLED_TOKENS, min(NOTED_TOKENS, int(len(hidden_TH) * NOTED_SHARE)))
        selected_TN = self._predictor.select(hidden_TH[-noted:])
        shares_N = selected_TN.float().mean(0).numpy()
        needed = np.flatnonzero(shares_N)
        portion = self._window.while_all_pass(needed, shares_N[needed], len(selected_TN))
        self.matrix.delete(portion.leaving)
        sampled_TN = selected_TN[-SAMPLED_TOKENS:]
        return self._exact.compute(hidden_TH, sampled_TN, portion.joining, self.matrix, self.counters)

    def _compute_selected(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        selected_TN = self._predictor.select(hidden_TH)
        needed = _neurons_of(selected_TN)
        expected = self._shared.tokens.expected(len(hidden_TH))
        kept = None if expected is None else _neurons_of(selected_TN[torch.from_numpy(expected)])
        self.counters.count_forward(selected_TN, len(needed))
        everything = not self._options.own_neurons_only and len(needed) <= self.matrix.capacity
        result_TH = torch.zeros_like(hidden_TH)
        for portion in self._window.portions(needed, kept):
            result_TH += self._compute_portion(hidden_TH, selected_TN, portion, everything)
        return self._products.with_bias(result_TH)

    def _compute_portion(
        self, hidden_TH: torch.Tensor, selected_TN: torch.Tensor, portion: Portion, everything: bool
    ) -> torch.Tensor:
        """The sum over a portion's neurons; with `everything`, over all in memory."""
        matrix, products = self.matrix, self._products
        matrix.delete(portion.leaving)
        there = matrix.num_used
        pending = matrix.append(portion.joining, self._store)
        neurons = np.sort(matrix.neurons) if everything else portion.needed
        places = torch.from_numpy(matrix.row_of[neurons])
        is_new = places >= there
        values_TN = hidden_TH.new_empty(len(hidden_TH), len(places))
        try:
            values_TN[:, ~is_new] = products.neurons(hidden_TH, self._rows, places[~is_new])
        finally:
            self._finish(pending, portion.joining)
        values_TN[:, is_new] = products.neurons(hidden_TH, self._rows, places[is_new])
        if self._options.own_neurons_only:
            values_TN.masked_fill_(~selected_TN[:, torch.from_numpy(neurons)], 0)
        self.counters.read += len(portion.joining)
        self.counters.portions += 1
        return products.down(values_TN, self._rows, places)

    def _finish(self, pending: PendingRead, joining: Indices) -> None:
        """Wait for a read. What did not arrive does not stay in the matrix."""
        try:
            pending.wait()
        except DriveFailed:
            self.matrix.delete(joining)
            raise


def attach(
    block: nn.Module,
    plan: BlockPlan,
    taken: Mapping[str, nn.Module],
    resident: Mapping[str, torch.Tensor],
    predictor: NeuronPredictor,
    store: WeightStore,
    options: SparseOptions,
    shared: SpanShared,
) -> SparseFeedForward:
    """Put a sparse layer in place of the modules that were taken out of `block`.

    Args:
        taken: what `take_out` returned, by role. The activation is used; weights are not needed.
        resident: the tensors of `plan.resident`, by their names in the block.
        predictor: of this block.
        store: holds its records; `close` of the returned layer closes it.
        shared: the same for all blocks of a span.
    """
    activation, path = taken[ACTIVATION], plan.modules[ACTIVATION]
    settings = {name.removeprefix(f"{path}."): value for name, value in resident.items() if name.startswith(f"{path}.")}
    activation.load_state_dict(settings, assign=True)
    layer = SparseFeedForward(plan, activation, resident, predictor, store, options, shared)
    put_in_place(block, plan, layer)
    return layer


def _neurons_of(selected_TN: torch.Tensor) -> Indices:
    """The neurons that any token selects, sorted."""
    return np.flatnonzero(selected_TN.any(0).numpy())
