"""Memory for experts, divided among blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import FlashBlock, take_out
from swarm.models.flash.experts.attach import MIN_SLOTS, attach, slots_of_layouts
from swarm.models.flash.experts.expert_site import find_experts
from swarm.models.flash.records import RecordLayout
from tests.models.flash.experts.flash_zoo import memory_store, resident_model


def layout(experts: int, width: int) -> RecordLayout:
    return RecordLayout.of({"w": (experts, width)}, {"w": 0}, torch.float32)


SMALL, LARGE = layout(4, 1024), layout(8, 3072)


def test_slots_fill_the_budget_and_no_more():
    blocks = {SMALL: 3, LARGE: 2}
    for budget in range(2 * (4096 + 12288), 400_000, 4096):
        slots = slots_of_layouts(blocks, budget)
        used = sum(number * one.stride for one, number in slots.items())
        assert used <= budget
        everything = slots == {SMALL: 12, LARGE: 16}
        assert everything or budget - used < SMALL.stride + LARGE.stride


def test_a_budget_for_less_than_two_experts_is_refused():
    least = MIN_SLOTS * SMALL.stride
    assert slots_of_layouts({SMALL: 1}, least) == {SMALL: MIN_SLOTS}
    with pytest.raises(NotEnoughMemory, match="two experts"):
        slots_of_layouts({SMALL: 1}, least - 1)


def test_tensors_of_the_module_that_are_no_records_stay_in_memory():
    """A norm behind each expert, which some families have."""
    model = resident_model("qwen3_moe")
    block = model.model.layers[1]
    experts = block.mlp.experts
    if not hasattr(experts, "has_post_expert_norm"):
        pytest.skip("transformers before 5.20 has no norm behind an expert")
    norm = nn.RMSNorm(32)
    nn.init.uniform_(norm.weight)
    experts.has_post_expert_norm, experts.post_expert_norm = True, norm
    hidden = torch.randn(1, 5, 32)
    with torch.inference_mode():
        expected = block.mlp(hidden)
        plan = find_experts(block)
        assert plan is not None
        assert plan.resident == ("mlp.experts.post_expert_norm.weight",)
        kept = {name: block.get_parameter(name).detach().clone() for name in plan.resident}
        store = memory_store(block, plan, torch.float32)
        taken = take_out(block, plan)
        taken["experts"].to("meta")  # as in a span that was built without weights
        attach([FlashBlock(block, plan, taken, kept, store)], 2 * store.layout.stride)
        assert torch.equal(block.mlp(hidden), expected)
