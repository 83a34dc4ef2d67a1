"""What blocks will cost when they are loaded, from what is planned for them: no weights are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarm.models.flash.costs.cost_model import BlockCosts, ExpertCosts, StreamedCosts, typical_hits
from swarm.models.flash.experts.attach import slots_of_layouts
from swarm.models.flash.files.planned_blocks import PlannedBlock
from swarm.models.flash.memory_shares import memory_needs, share_memory
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.sparsity import Sparsity
from swarm.models.flash.streaming.residency import choose_resident


def planned_costs(blocks: Sequence[PlannedBlock], memory: int) -> list[BlockCosts]:
    """The blocks of a span as the cost model sees them if they are loaded with `memory` bytes for weights.

    A mixture that does not say how many experts a token needs counts as one whose tokens need all of them.

    Raises:
        NotEnoughMemory: the blocks cannot be computed with so little memory.
        ValueError: neurons are selected in a block, and which ones is not known before it is prepared.
    """
    if any(one.plan.kind is RecordKind.NEURONS for one in blocks):
        raise ValueError("what blocks of neurons cost is known only when their predictors were made")
    needs = memory_needs([(one.plan.kind, one.layout) for one in blocks])
    shares = share_memory(memory - sum(one.resident_bytes for one in blocks), needs)
    mixtures = Counter(one.layout for one in blocks if one.plan.kind is RecordKind.EXPERTS)
    slots = slots_of_layouts(mixtures, shares.get(RecordKind.EXPERTS, 0))
    streamed = [one.layout.stride for one in blocks if one.plan.kind is RecordKind.BLOCK]
    stays = iter(choose_resident(streamed, shares[RecordKind.BLOCK]) if streamed else ())
    costs: list[BlockCosts] = []
    for one in blocks:
        layout = one.layout
        if one.plan.kind is RecordKind.EXPERTS:
            needed = (one.experts_per_token or layout.count) / layout.count
            room, hits = slots[layout] // mixtures[layout], typical_hits(needed)
            costs.append(ExpertCosts(one.resident_bytes, layout.stride, layout.count, Sparsity((needed,)), room, hits))
        elif next(stays):
            costs.append(StreamedCosts(one.resident_bytes + layout.stride, 0))
        else:
            costs.append(StreamedCosts(one.resident_bytes, layout.stride))
    return costs


def whole_bytes(blocks: Sequence[PlannedBlock]) -> int:
    """Memory for weights with which nothing of the blocks is read after loading."""
    needs = memory_needs([(one.plan.kind, one.layout) for one in blocks])
    return sum(one.resident_bytes for one in blocks) + sum(need.whole for need in needs.values())
