"""A block whose records are on flash, before anything computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from swarm.models.flash.neurons.predictor import CalibratedPredictor
from swarm.models.flash.plans.block_plan import BlockPlan
from swarm.models.flash.records.weight_store import WeightStore


@dataclass(frozen=True)
class FlashBlock:
    """A block whose modules were taken out, and where their weights are.

    Attributes:
        block: the family's module, with a `TakenOut` in each place of the plan.
        plan: by which the modules were taken out.
        taken: the modules, by their roles, as `take_out` returns them. Their tensors may be on the meta device.
        resident: the tensors that `plan.resident` names.
        store: holds the block's records.
        predictor: selects the neurons of a block of which tokens need few; None for other blocks.
    """

    block: nn.Module
    plan: BlockPlan
    taken: Mapping[str, nn.Module]
    resident: Mapping[str, torch.Tensor]
    store: WeightStore
    predictor: CalibratedPredictor | None = None
