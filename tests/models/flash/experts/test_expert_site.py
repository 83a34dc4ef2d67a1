"""Where a block's experts are."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.models.flash.block_plan import RecordKind, TakenOut, take_out
from swarm.models.flash.experts.expert_site import EXPERTS, find_experts
from tests import zoo
from tests.models.flash.experts.flash_zoo import EXPERT_FAMILIES, layers_of


def meta_layers(family: str) -> nn.ModuleList:
    with torch.device("meta"):
        return layers_of(AutoModelForCausalLM.from_config(zoo.config_of(family)))


class OtherExperts(nn.Module):
    """Experts that are called in a way of their own."""

    def __init__(self, forward_of_one: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 8, 12))
        self.down_proj = nn.Parameter(torch.empty(4, 6, 8))
        self.forward_of_one = forward_of_one

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.forward_of_one:
            raise RuntimeError("the inputs of all four experts are needed")
        rows = hidden_states.view(self.gate_up_proj.shape[0], -1, 8)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(gate * up, self.down_proj).view(-1, 8)


def test_the_experts_of_every_family_are_found_in_the_blocks_that_have_some():
    found = 0
    for block in (layer for family in EXPERT_FAMILIES for layer in meta_layers(family)):
        has_experts = any(parameter.dim() == 3 for parameter in block.parameters())
        plan = find_experts(block)
        assert (plan is not None) == has_experts
        if plan is None:
            continue
        found += 1
        assert plan.kind is RecordKind.EXPERTS
        whole = sum(block.get_parameter(name).numel() for name in plan.axes)
        assert whole == sum(one.numel() for one in block.get_submodule(plan.modules[EXPERTS]).parameters())
        counts = {block.get_parameter(name).shape[0] for name in plan.axes}
        taken = take_out(block, plan)
        assert counts == {taken[EXPERTS].num_experts}
        assert isinstance(block.get_submodule(plan.modules[EXPERTS]), TakenOut)
    assert found >= len(EXPERT_FAMILIES)


def test_dense_blocks_have_none():
    assert all(find_experts(block) is None for family in ("llama", "opt", "gpt2") for block in meta_layers(family))


def test_a_block_with_two_modules_of_experts_is_left_alone():
    block = nn.ModuleList([OtherExperts(True), OtherExperts(True)])
    assert find_experts(block) is None
