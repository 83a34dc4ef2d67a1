"""Which of a block's tensors go to flash, and as what kind of record.

A plan is found once, from the block's own modules (`planned_blocks`), stored in the manifest of the packed file, and
read back at each later start. It names modules and tensors by their paths inside the block, so it needs no weights.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from swarm.models.flash.neurons.predictor import CalibratedPredictor
from swarm.models.flash.records import RecordLayout, WeightStore


class RecordKind(enum.StrEnum):
    """What one record is. `NEURONS` makes a span approximate; the others are exact."""

    NEURONS = "neurons"
    EXPERTS = "experts"
    BLOCK = "block"


@dataclass(frozen=True)
class BlockPlan:
    """What of a block goes to flash.

    Attributes:
        kind: what one record is.
        modules: role to path of each module that is taken out of the block, such as "up" to "mlp.up_proj". The roles
            are those of the kind.
        axes: each tensor that goes to flash, and the axis that counts its records; None if it is whole in one record.
        resident: the other tensors of the modules in `modules`, which stay in memory (biases).
    """

    kind: RecordKind
    modules: Mapping[str, str]
    axes: Mapping[str, int | None]
    resident: tuple[str, ...] = ()

    def layout(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> RecordLayout:
        """The layout of the block's records, for tensors of these shapes."""
        return RecordLayout.of(shapes, self.axes, dtype)


class TakenOut(nn.Module):
    """Stands where a module was taken out of its block, until something that reads records takes the place."""


def take_out(block: nn.Module, plan: BlockPlan) -> dict[str, nn.Module]:
    """Replace the plan's modules in `block` by placeholders without weights. Returns the modules by their roles."""
    taken = {role: block.get_submodule(path) for role, path in plan.modules.items()}
    for path in plan.modules.values():
        block.set_submodule(path, TakenOut())
    return taken


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
