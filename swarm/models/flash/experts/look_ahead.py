"""Reads experts of the next block before it is computed: its router is asked what it would do with this block's inputs.

A guess is often right (the residual stream changes little from block to block), but a wrong one costs a read, and how
often it is right differs between blocks. So every guess is judged when its block is computed, and experts are read
ahead only for blocks where most guesses were right; only the likeliest ones, after everything that the block before
needs has arrived, and into slots whose experts are less likely to be needed. Prompts need nearly all experts; nothing
is read ahead for them.

Measured with the routing of a small trained model and experts of 9.4 MB, a quarter in memory: where 9 of 10 guesses
were right, reading ahead took a quarter to a third of the waiting away and read up to 3 % more; where 4 of 10 were
right, it saved nothing and read 24 % more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.models.flash.experts.expert_forward import FlashExperts
from swarm.models.flash.experts.expert_pool import ABSENT, ExpertPool
from swarm.models.flash.records import Indices

MAX_TOKENS = 8
"""Tokens of a forward for which experts are read ahead; more of them need most experts anyway."""

GUESSED_SHARE = 0.5
"""How many of the likeliest experts are guessed, as a share of those that a token needs."""

MIN_CHANCE = 0.7
"""Share of right guesses from which on experts are read ahead."""

FIRST_CHANCE = 0.5
"""Share of right guesses that is believed before there were any."""

JUDGED_GUESSES = 64
"""Guesses over which the share is averaged."""


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

    Attributes:
        chance_B: for each block, the share of guesses that were right lately.
    """

    def __init__(self, pool: ExpertPool, modules: Sequence[FlashExperts], routers: Sequence[nn.Module | None]) -> None:
        self.chance_B = np.full(len(modules), FIRST_CHANCE)
        self._pool = pool
        self._routers = list(routers)
        self._inputs_NH: torch.Tensor | None = None  # of the router that ran last
        self._guesses: dict[int, Indices] = {}  # for a block, experts that were absent
        for number, (module, router) in enumerate(zip(modules, routers, strict=True)):
            module.next_block = partial(self.read_ahead, number)
            if router is not None:
                router.register_forward_pre_hook(self._note_inputs)

    def read_ahead(self, block: int, needed: Indices, experts_a_token: int, in_use: Indices) -> None:
        """Judge what was guessed for `block`, which has what it needs, and guess for the next one."""
        self._judge(block, needed)
        inputs_NH, self._inputs_NH = self._inputs_NH, None
        router = self._routers[block + 1] if block + 1 < len(self._routers) else None
        if inputs_NH is None or router is None or inputs_NH.numel() // inputs_NH.shape[-1] > MAX_TOKENS:
            return
        count = math.ceil(GUESSED_SHARE * experts_a_token)
        likely = likeliest_experts(router_logits(router, inputs_NH), count)
        absent = likely[self._pool.cache.slots_of(block + 1, likely) == ABSENT]
        self._guesses[block + 1] = absent
        chance = float(self.chance_B[block + 1])
        if chance >= MIN_CHANCE:
            self._pool.look_ahead(block + 1, absent, chance, in_use)

    def _judge(self, block: int, needed: Indices) -> None:
        guessed = self._guesses.pop(block, None)
        if guessed is not None and len(guessed):
            right = float(np.isin(guessed, needed).mean())
            weight = 1 - (1 - 1 / JUDGED_GUESSES) ** len(guessed)
            self.chance_B[block] += weight * (right - self.chance_B[block])

    def _note_inputs(self, router: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inputs_NH = inputs[0] if inputs else None


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
