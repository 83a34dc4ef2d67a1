"""Modules that take the place of a block's experts, and compute with those that a pool has in memory.

Exact: experts are computed one by one with the family's own parts, each with all of its tokens, and their outputs are
added in the order of each token's experts, when all are there. That is what `grouped_mm_experts_forward` of
`transformers.integrations.moe` does, which resident models use, so the results have the same bits on a CPU; in what
order the experts arrived makes no difference. Under torch versions for which transformers chooses its "eager" way, the
order of the sum, and so its rounding, differs.

Shapes: N tokens, K experts a token, S = N * K pairs of a token and an expert, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.errors import InvalidOption
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.experts.expert_site import expert_tensors
from swarm.models.flash.records import Indices

Weights = dict[str, torch.Tensor]
"""One expert's weights and biases, by their names in the experts module."""


class FlashExperts(nn.Module):
    """Base of both: the family's own module, without the weights of experts, and where these are.

    Args:
        experts: the module that was taken out of the block. Its parameters that are records are dropped.
        path: of that module inside its block; names of the records' tensors begin with it.
        pool: has the experts.
        block: the block's number in the pool.
    """

    def __init__(self, experts: nn.Module, path: str, pool: ExpertPool, block: int) -> None:
        super().__init__()
        names = expert_tensors(experts)
        self.num_experts = pool.buffer.layout.count
        self._pool, self._block = pool, block
        self._weights = {name: pool.buffer.field(f"{path}.{name}") for name in names}
        for name in names:
            experts.register_parameter(name, None)
        self.family = experts

    def _visit(self, needed: Indices, shares: np.ndarray, tokens: int) -> Generator[tuple[int, Weights], None, None]:
        """Each needed expert and its weights, in the order in which they become available."""
        if torch.is_grad_enabled():
            raise InvalidOption("experts on flash compute no gradients: their weights are replaced while it computes")
        with closing(self._pool.visit(self._block, needed, shares, tokens)) as parts:
            for part in parts:
                for expert, slot in zip(part.experts.tolist(), part.slots.tolist(), strict=True):
                    yield expert, {name: weight[slot] for name, weight in self._weights.items()}


class RoutedFlashExperts(FlashExperts):
    """In place of experts that are called with each token's experts and their weights."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, top_k = top_k_index.shape
        expert_S, order_S = torch.sort(top_k_index.reshape(-1))
        needed, first, count = np.unique(expert_S.numpy(), return_index=True, return_counts=True)
        pairs = {expert: order_S[at : at + n] for expert, at, n in zip(needed.tolist(), first, count, strict=True)}
        dtype = self._weights["down_proj"].dtype
        output_SH = hidden_states.new_empty(len(order_S), hidden_states.shape[-1], dtype=dtype)
        with closing(self._visit(needed.astype(np.int64), count / max(tokens, 1), tokens)) as visit:
            for expert, weights in visit:
                rows = pairs[expert]
                output_SH[rows] = self._one_expert(weights, hidden_states[rows // top_k])
        weighted_SH = output_SH * top_k_weights.reshape(-1, 1)
        return weighted_SH.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _one_expert(self, weights: Weights, hidden_RH: torch.Tensor) -> torch.Tensor:
        family: Any = self.family
        first = "gate_up_proj" if family.has_gate else "up_proj"
        inner = self._product(weights, first, hidden_RH)
        inner = family._apply_gate(inner) if family.has_gate else family.act_fn(inner)
        output: torch.Tensor = self._product(weights, "down_proj", inner)
        return family.post_expert_norm(output) if getattr(family, "has_post_expert_norm", False) else output

    def _product(self, weights: Weights, name: str, inputs: torch.Tensor) -> torch.Tensor:
        weight = weights[name]
        product = torch.mm(inputs.to(weight.dtype), weight if self.family.is_transposed else weight.T)
        return product.add_(weights[f"{name}_bias"]) if self.family.has_bias else product


class EveryFlashExpert(FlashExperts):
    """In place of experts that are called with the inputs of every expert, `[E * N, H]`; rows of zeros yield zeros."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_ENH = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        tokens = hidden_ENH.shape[1]
        routed_E = (hidden_ENH != 0).any(dim=2).sum(dim=1).numpy()
        needed = np.flatnonzero(routed_E)
        output_ENH = torch.zeros_like(hidden_ENH)
        with closing(self._visit(needed, routed_E[needed] / max(tokens, 1), tokens)) as visit:
            for expert, weights in visit:
                one = {name: weight.unsqueeze(0) for name, weight in weights.items()}
                output_ENH[expert] = torch.func.functional_call(self.family, one, (hidden_ENH[expert],))
        return output_ENH.view(hidden_states.shape)
