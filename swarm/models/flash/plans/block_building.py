"""Building a block whose large weights stay on flash: all but the modules that its plan takes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarm.models.block_loading import fill_block
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.plans.block_plan import BlockPlan, take_out


@dataclass
class BuiltBlock:
    """A model cut to one block, without the modules that the plan takes out.

    Attributes:
        model: the family's base model on the CPU, with the config of the whole model; its list of layers holds this
            block, with a `TakenOut` in each place of the plan.
        taken: the modules that stood there, by their roles, on the meta device: shapes and settings, no weights.
    """

    model: Any
    taken: dict[str, nn.Module]


def build_block(
    checkpoint: Checkpoint, block: int, dtype: torch.dtype, plan: BlockPlan, tensors: Mapping[str, torch.Tensor]
) -> BuiltBlock:
    """Build a block from the tensors that stay in memory.

    No weight of a module that is taken out is ever allocated. Tensors that already have `dtype` are used as they are,
    not copied.

    Args:
        tensors: the block's tensors outside of records, by their names inside the loaded block (after transformers'
            conversions). Those in `plan.resident` belong to the modules that are taken out and are passed over: what
            takes their place gets them from the caller.

    Raises:
        CheckpointError: tensors are missing or do not fit the model.
    """
    taken: dict[str, nn.Module] = {}
    kept = {name: tensor for name, tensor in tensors.items() if name not in plan.resident}
    model = fill_block(
        checkpoint, block, dtype, kept, change=lambda layer: taken.update(take_out(layer, plan)), converted=True
    )
    return BuiltBlock(model, taken)
