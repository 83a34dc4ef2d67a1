"""How fast blocks on flash will be, by the cost model. Their speed cannot be measured before there is real text.

Which experts and neurons a token needs depends on what the text is about; random inputs need others than a text does.
"""

from __future__ import annotations

import logging

import torch

from swarm.models.block_loading import return_freed_memory
from swarm.models.execution.span_model import SpanModel
from swarm.models.flash.costs.cost_model import FlashCostModel, describe
from swarm.models.flash.costs.span_costs import span_cost_model

logger = logging.getLogger(__name__)


def predict_speed(model: SpanModel) -> FlashCostModel:
    """The cost model of a loaded span on flash. Measures this machine for a second or two, and logs what it expects."""
    flash = model.flash
    assert flash is not None
    assert flash.drive is not None
    costs = span_cost_model(flash, flash.drive, model.hidden_size, _experts_per_token(model))
    return_freed_memory()  # what was measured with is not in the budget
    if any(block.stride for block in costs.blocks):
        logger.info("%s", describe(costs, flash.weight_bytes - sum(flash.resident_bytes)))
    return costs


def _experts_per_token(model: SpanModel) -> float:
    """Number of experts that each mixture sends a token to, found by computing one; 0 without mixtures."""
    assert model.flash is not None
    if not model.flash.pools:
        return 0.0
    before = model.flash.use().needed
    mixtures = sum(len(pool.stores) for pool in model.flash.pools)
    model.forward(torch.randn(1, 1, model.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.dtype))
    return (model.flash.use().needed - before) / mixtures
