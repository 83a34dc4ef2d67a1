"""Reads experts of the next block before it is computed: its router is asked what it would do with this block's inputs.

The guess is good (the residual stream changes little from block to block) but not exact, and a wrong guess costs a
read. So only the likeliest experts are read ahead, after everything that this block needs has arrived, and only into
slots whose experts are less likely to be needed. Prompts need nearly all experts; nothing is read ahead for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.models.flash.experts.expert_forward import FlashExperts
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.record_buffer import Indices

MAX_TOKENS = 8
"""Tokens of a forward for which experts are read ahead; more of them need most experts anyway."""

EXPECTED_CHANCE = 0.6
"""Share of absent experts read ahead that the next block needs, before anything was measured."""

MEASURED_READS = 64
"""Reads ahead that the expected share counts as, beside those that were measured."""


def find_router(block: nn.Module, experts_path: str, experts: int) -> nn.Module | None:
    """The module that decides which experts a token is sent to: beside the experts, with one row of weights for each.

    None unless there is exactly one such module.
    """
    around = block.get_submodule(experts_path.rpartition(".")[0])
    held = set(block.get_submodule(experts_path).modules())
    routers = [
        module
        for module in around.modules()
        if module not in held
        and isinstance(weight := module._parameters.get("weight"), torch.Tensor)
        and weight.dim() == 2
        and weight.shape[0] == experts
    ]
    return routers[0] if len(routers) == 1 else None


def router_logits(router: nn.Module, inputs_NH: torch.Tensor) -> torch.Tensor:
    """What a router's weights make of hidden states, `[N, experts]`; what a family adds to choose is left out."""
    weight, bias = router.get_parameter("weight"), router._parameters.get("bias")
    return nn.functional.linear(inputs_NH.flatten(0, -2).to(weight.dtype), weight, bias)


class LookAhead:
    """Connects the blocks of a pool: when one has what it needs, experts of the next one begin to be read.

    Args:
        pool: of the blocks.
        modules: the experts modules of the blocks, in order.
        routers: of the same blocks; None where a block's router is not known.
        experts_a_token: how many of the likeliest experts of each token are read ahead.
    """

    def __init__(
        self,
        pool: ExpertPool,
        modules: Sequence[FlashExperts],
        routers: Sequence[nn.Module | None],
        experts_a_token: int,
    ) -> None:
        self._pool = pool
        self._routers = list(routers)
        self._experts_a_token = experts_a_token
        self._inputs_NH: torch.Tensor | None = None  # of the router that ran last
        for number, module in enumerate(modules[:-1]):
            here, following = routers[number], routers[number + 1]
            if here is not None and following is not None:
                here.register_forward_pre_hook(self._note_inputs)
                module.look_ahead = _ForBlock(self, number + 1)

    @property
    def chance(self) -> float:
        """Share of the experts read ahead that were needed, as far as was measured."""
        counters = self._pool.counters
        expected = EXPECTED_CHANCE * MEASURED_READS
        return (counters.look_ahead_hits + expected) / (counters.look_ahead_reads + MEASURED_READS)

    def read_ahead(self, block: int, in_use: Indices) -> None:
        """Begin to read what `block`, which comes next, will probably need."""
        inputs_NH, router = self._inputs_NH, self._routers[block]
        self._inputs_NH = None
        if inputs_NH is None or router is None or inputs_NH.numel() // inputs_NH.shape[-1] > MAX_TOKENS:
            return
        experts = likeliest_experts(router_logits(router, inputs_NH), self._experts_a_token)
        self._pool.look_ahead(block, experts, self.chance, in_use)

    def _note_inputs(self, router: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inputs_NH = inputs[0] if inputs else None


class _ForBlock:
    """What an experts module calls when the drive has nothing else to do."""

    def __init__(self, look_ahead: LookAhead, block: int) -> None:
        self._look_ahead, self._block = look_ahead, block

    def __call__(self, in_use: Indices) -> None:
        self._look_ahead.read_ahead(self._block, in_use)


def likeliest_experts(logits_NE: torch.Tensor, experts_a_token: int) -> Indices:
    """The likeliest experts of all tokens, each once, the likeliest first.

    Args:
        logits_NE: of a router; higher is likelier.
        experts_a_token: how many count for each token.
    """
    top = torch.topk(logits_NE.float(), min(experts_a_token, logits_NE.shape[-1]), dim=-1)
    # Logits of different tokens are compared by how far they are above the last expert that counts.
    lead_NK = top.values - top.values[:, -1:]
    experts, leads = top.indices.flatten().numpy(), lead_NK.flatten().numpy()
    order = np.argsort(-leads, kind="stable")
    _, first = np.unique(experts[order], return_index=True)
    return experts[order][np.sort(first)].astype(np.int64)
