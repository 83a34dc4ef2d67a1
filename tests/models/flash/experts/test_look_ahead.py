"""Experts of the next block, read before they are needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from swarm.models.flash.experts.attach import ExpertOptions
from swarm.models.flash.experts.expert_site import EXPERTS, find_experts
from swarm.models.flash.experts.look_ahead import find_router, likeliest_experts
from tests import zoo
from tests.models.flash.experts.flash_zoo import EXPERT_FAMILIES, flash_model, layers_of, resident_model


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_every_family_reads_ahead_and_computes_the_same(family):
    resident = resident_model(family)
    flash = flash_model(resident, 0.5, ExpertOptions(look_ahead=2))
    assert zoo.greedy_texts(flash.model) == zoo.greedy_texts(resident)
    counters = flash.pools[0].counters
    assert counters.look_ahead_reads > 0
    assert 0 < counters.look_ahead_hits <= counters.look_ahead_reads
    read = counters.misses + counters.look_ahead_reads
    assert flash.pools[0].bytes_read == read * flash.pools[0].buffer.layout.stride


def test_the_router_beside_the_experts_is_found():
    block = layers_of(resident_model("qwen2_moe"))[1]
    plan = find_experts(block)
    assert plan is not None
    assert find_router(block, plan.modules[EXPERTS], 4) is block.mlp.gate
    assert find_router(block, plan.modules[EXPERTS], 5) is None
    block.mlp.other = nn.Linear(32, 4)
    assert find_router(block, plan.modules[EXPERTS], 4) is None


def test_a_prompt_reads_nothing_ahead():
    flash = flash_model(resident_model("mixtral"), 0.5, ExpertOptions(look_ahead=2))
    with torch.inference_mode():
        flash.model(torch.tensor([zoo.PROMPTS[1]]))
    assert flash.pools[0].counters.look_ahead_reads == 0


def test_a_block_whose_router_is_not_known_is_left_out():
    resident = resident_model("mixtral")
    for block in layers_of(resident)[::2]:
        block.mlp.second = nn.Linear(32, 4)
    flash = flash_model(resident, 0.5, ExpertOptions(look_ahead=2))
    assert zoo.greedy_texts(flash.model, 4) == zoo.greedy_texts(resident, 4)
    assert flash.pools[0].counters.look_ahead_reads == 0


def test_the_likeliest_experts_of_several_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0], [0.0, 5.0, 0.0, 9.0]])
    np.testing.assert_array_equal(likeliest_experts(logits, 1), [0, 3])
    assert likeliest_experts(logits, 2).tolist() == [3, 0, 2, 1]
    assert sorted(likeliest_experts(logits, 9).tolist()) == [0, 1, 2, 3]
