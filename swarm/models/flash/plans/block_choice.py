"""Which kind of records a block becomes: decided from the block's own modules, the same at each start."""

from __future__ import annotations

import copy

import torch
from torch import nn

from swarm.models.flash.experts.expert_site import find_experts
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward, is_sparse_activation
from swarm.models.flash.plans.block_plan import BlockPlan
from swarm.models.flash.streaming.streamed_site import plan_streamed

Structure = tuple[object, ...]


class BlockPlanner:
    """Plans blocks, one after the other. Blocks that are built alike get the same plan, which is found once.

    Args:
        exact: never select neurons; blocks of which a token needs few neurons are streamed instead.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._known: dict[Structure, BlockPlan | None] = {}

    def plan(self, block: nn.Module) -> BlockPlan | None:
        """The plan of a block, which may be on the meta device; None if nothing of it can go to flash."""
        structure = _structure(block)
        if structure not in self._known:
            self._known[structure] = plan_block(block, self._exact)
        return self._known[structure]


def plan_block(block: nn.Module, exact: bool = False) -> BlockPlan | None:
    """The plan that reads least for a token: experts, neurons (unless `exact`), or else the whole block.

    Args:
        block: in the dtypes in which it will compute; it may be on the meta device.
    """
    experts = find_experts(block)
    if experts is not None:
        return experts
    if not exact and any(is_sparse_activation(module) for module in block.modules()):
        sparse = find_sparse_feed_forward(_with_values(block))
        if sparse is not None:
            return sparse
    return plan_streamed(block)


def _with_values(block: nn.Module) -> nn.Module:
    """The block as it is, or with random weights if it is on the meta device: what it computes can then be tried."""
    if all(not tensor.is_meta for tensor in block.parameters()):
        return block
    made = copy.deepcopy(block).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if tensor.ndim >= 2 and tensor.is_floating_point():
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
            else:  # norms multiply by one and add nothing; a threshold is zero
                tensor.fill_(tensor.ndim == 1 and not name.endswith("bias"))
    return made.eval()


def _structure(block: nn.Module) -> Structure:
    """What plans depend on: the kinds of the modules, and the shapes and dtypes of their tensors."""
    modules = [(path, type(module), repr(module)) for path, module in block.named_modules()]
    tensors = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in block.named_parameters()]
    return (*modules, *tensors)
