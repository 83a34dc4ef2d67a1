"""The cost model of a loaded span: what its blocks read, with how much memory, on this machine."""

from __future__ import annotations

from torch import nn

from swarm.models.flash.costs.compute_speed import machine_speed
from swarm.models.flash.costs.cost_model import (
    BlockCosts,
    ExpertCosts,
    FlashCostModel,
    NeuronCosts,
    ReadingSpeed,
    StreamedCosts,
    typical_hits,
)
from swarm.models.flash.flash_block import FlashBlock
from swarm.models.flash.flash_span import FlashSpan
from swarm.models.flash.neurons.feed_forward_site import ACTIVATION
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.sparsity import Sparsity


def span_cost_model(flash: FlashSpan, drive: ReadingSpeed, hidden: int, experts_per_token: float) -> FlashCostModel:
    """The cost model of a span. Measures products for a second or two.

    Args:
        drive: how fast the packed files are read.
        hidden: the model's hidden size.
        experts_per_token: experts to which a token is sent in each mixture; ignored if there is none.
    """
    # Blocks of neurons decide, if there are any: products with their records are slower than others.
    main = next((one for one in flash.blocks if one.plan.kind is RecordKind.NEURONS), flash.blocks[0])
    activation: nn.Module | None = main.taken.get(ACTIVATION)
    machine = machine_speed(drive, main.plan, main.store.layout, hidden, activation)
    return FlashCostModel(machine, block_costs(flash, experts_per_token))


def block_costs(flash: FlashSpan, experts_per_token: float) -> list[BlockCosts]:
    """The blocks of a span as the cost model sees them."""
    stays = iter(flash.stream.stays if flash.stream is not None else ())
    layers = iter(flash.neurons)
    costs: list[BlockCosts] = []
    for one, resident in zip(flash.blocks, flash.resident_bytes, strict=True):
        stride, count = one.store.layout.stride, one.store.layout.count
        if one.plan.kind is RecordKind.NEURONS:
            assert one.predictor is not None
            costs.append(NeuronCosts(resident, stride, count, one.predictor.sparsity, next(layers).matrix.capacity))
        elif one.plan.kind is RecordKind.EXPERTS:
            needed = min(1.0, experts_per_token / count)
            slots, hits = _slots(flash, one), typical_hits(needed)
            costs.append(ExpertCosts(resident, stride, count, Sparsity((needed,)), slots, hits))
        elif next(stays):
            costs.append(StreamedCosts(resident + stride, 0))
        else:
            costs.append(StreamedCosts(resident, stride))
    return costs


def _slots(flash: FlashSpan, one: FlashBlock) -> int:
    """Experts of a block that its pool has room for, if all blocks of the pool get as many."""
    pool = next(pool for pool in flash.pools if any(store is one.store for store in pool.stores))
    return pool.buffer.slots // len(pool.stores)
