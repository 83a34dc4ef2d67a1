"""Models of the zoo whose experts were taken out and put into stores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.cutting import cut_layers
from swarm.models.flash.block_plan import BlockPlan, FlashBlock, take_out
from swarm.models.flash.experts.attach import attach
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.experts.expert_site import find_experts
from swarm.models.flash.records import WeightStore
from tests import zoo

EXPERT_FAMILIES = tuple(family for family, config in zoo.TABLE.items() if any("expert" in name for name in config))


def resident_model(family: str, dtype: torch.dtype = torch.float32, **overrides: int) -> PreTrainedModel:
    """A tiny model with all weights in memory; the same family always has the same weights."""
    return zoo.make_model(family, **overrides).to(dtype).eval()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    _, owner, name = cut_layers.find_layers(model.base_model, zoo.BLOCKS)
    return getattr(owner, name)


def memory_store(block: nn.Module, plan: BlockPlan, dtype: torch.dtype) -> MemoryStore:
    """A store of the experts of a block that still has them."""
    tensors = {name: block.get_parameter(name).detach() for name in plan.axes}
    layout = plan.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    return MemoryStore(layout, tensors)


@dataclass
class FlashModel:
    """A model whose experts are in stores.

    Attributes:
        stores: one for each block that has experts.
    """

    model: PreTrainedModel
    stores: list[WeightStore]
    pools: list[ExpertPool]


def flash_model(
    resident: PreTrainedModel,
    share: float,
    stored: Callable[[MemoryStore], WeightStore] = lambda store: store,
) -> FlashModel:
    """A copy of `resident` with memory for `share` of its experts, at least for two.

    Args:
        stored: another store with the records of the one that is given.
    """
    model = copy.deepcopy(resident)
    blocks = []
    for block in layers_of(model):
        plan = find_experts(block)
        if plan is not None:
            kept = {name: block.get_parameter(name).detach() for name in plan.resident}
            store = stored(memory_store(block, plan, model.dtype))
            blocks.append(FlashBlock(block, plan, take_out(block, plan), kept, store))
    whole = sum(one.store.layout.file_bytes for one in blocks)
    least = 2 * blocks[0].store.layout.stride
    pools = attach(blocks, max(least, int(share * whole)))
    return FlashModel(model, [one.store for one in blocks], pools)
