"""Puts experts that are read on demand into blocks whose own experts were taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from swarm.common.units import format_bytes
from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import FlashBlock
from swarm.models.flash.experts.expert_forward import EveryFlashExpert, FlashExperts, RoutedFlashExperts
from swarm.models.flash.experts.expert_pool import ExpertCache, ExpertPool
from swarm.models.flash.experts.expert_site import EXPERTS, ExpertCall, expert_call
from swarm.models.flash.records import RecordLayout
from swarm.models.flash.stay_priority import DecayedFrequency

MIN_SLOTS = 2
"""One expert computes while the next one is read."""

GROUP_BYTES = 2 << 20
"""Small experts are read together until they have so many bytes; each larger one is read, and computed, alone."""


def attach(blocks: Sequence[FlashBlock], budget_bytes: int) -> list[ExpertPool]:
    """Have `blocks` compute with experts from their stores, of which as many stay in memory as the budget holds.

    Blocks whose experts have the same layout, which in nearly every model are all, share one pool of slots.

    Args:
        blocks: in the order of the span.
        budget_bytes: memory for experts.

    Returns:
        the pools; their counters say what was read.

    Raises:
        NotEnoughMemory: the budget does not hold two experts of each layout.
    """
    groups: dict[RecordLayout, list[FlashBlock]] = {}
    for one in blocks:
        groups.setdefault(one.store.layout, []).append(one)
    slots = slots_of_layouts({layout: len(group) for layout, group in groups.items()}, budget_bytes)
    return [_attach_pool(group, slots[layout]) for layout, group in groups.items()]


def slots_of_layouts(blocks: Mapping[RecordLayout, int], budget_bytes: int) -> dict[RecordLayout, int]:
    """How many slots each layout gets: the same share of all its experts, and never more than there are.

    Args:
        blocks: number of blocks of each layout.

    Raises:
        NotEnoughMemory: the budget does not hold two experts of each layout.
    """
    least = sum(MIN_SLOTS * layout.stride for layout in blocks)
    if budget_bytes < least:
        raise NotEnoughMemory(
            f"{format_bytes(budget_bytes)} for experts on flash is too little: {format_bytes(least)} is the least, for "
            "two experts; give it more memory, or serve these blocks elsewhere"
        )
    whole = sum(number * layout.file_bytes for layout, number in blocks.items())
    share = min(1.0, (budget_bytes - least) / max(1, whole - least))
    return {
        layout: MIN_SLOTS + int(share * max(0, number * layout.count - MIN_SLOTS)) for layout, number in blocks.items()
    }


def _attach_pool(blocks: Sequence[FlashBlock], slots: int) -> ExpertPool:
    layout = blocks[0].store.layout
    cache = ExpertCache(slots, DecayedFrequency(len(blocks), layout.count), max(1, GROUP_BYTES // layout.stride))
    pool = ExpertPool([one.store for one in blocks], cache)
    for number, one in enumerate(blocks):
        path = one.plan.modules[EXPERTS]
        one.block.set_submodule(path, _flash_experts(one, path, pool, number))
    return pool


def _flash_experts(one: FlashBlock, path: str, pool: ExpertPool, number: int) -> FlashExperts:
    """The module that takes the experts' place."""
    experts = one.taken[EXPERTS]
    kind = RoutedFlashExperts if expert_call(experts) is ExpertCall.ROUTED else EveryFlashExpert
    made = kind(experts, path, pool, number)
    for name in one.plan.resident:
        owner, _, own_name = name.removeprefix(f"{path}.").rpartition(".")
        module = experts.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = one.resident[name]
        else:
            module.register_parameter(own_name, nn.Parameter(one.resident[name], requires_grad=False))
    return made
