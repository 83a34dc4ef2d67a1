"""Which kind of records a block becomes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from swarm.models.cutting import cut_layers
from swarm.models.flash.plans.block_choice import BlockPlanner, plan_block
from swarm.models.flash.plans.block_plan import RecordKind
from tests import zoo

EXPECTED = {
    "llama": RecordKind.BLOCK,
    "gpt2": RecordKind.BLOCK,
    "opt": RecordKind.NEURONS,
    "mixtral": RecordKind.EXPERTS,
    "llama4_text": RecordKind.EXPERTS,
}


def layers(family: str, device: str) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(zoo.config_of(family)).eval()
    path, _, _ = cut_layers.find_layers(model, zoo.BLOCKS)
    return list(model.get_submodule(path))


@pytest.mark.parametrize("family", EXPECTED)
def test_a_plan_needs_no_weights(family):
    with_weights, without = layers(family, "cpu")[1], layers(family, "meta")[1]
    plan = plan_block(without)
    assert plan.kind is EXPECTED[family]
    assert plan == plan_block(with_weights)
    assert all(tensor.is_meta for tensor in without.parameters()), "the block itself was filled"


def test_exact_servers_stream_what_could_be_selected():
    block = layers("opt", "meta")[0]
    assert plan_block(block, exact=True).kind is RecordKind.BLOCK
    assert plan_block(layers("mixtral", "meta")[0], exact=True).kind is RecordKind.EXPERTS


def test_blocks_that_are_built_alike_are_tried_once_and_others_are_told_apart(monkeypatch):
    from swarm.models.flash.plans import block_choice

    tried = []
    real = block_choice.plan_block
    monkeypatch.setattr(block_choice, "plan_block", lambda *args: tried.append(args) or real(*args))
    planner = BlockPlanner()
    kinds = [planner.plan(layer).kind for layer in layers("deepseek_v3", "meta")]
    assert kinds == [RecordKind.BLOCK] * 4 + [RecordKind.EXPERTS] * 2
    assert len(tried) == 2
