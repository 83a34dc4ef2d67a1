"""Experts of the next block, read before they are needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from swarm.models.flash.experts import look_ahead
from swarm.models.flash.experts.expert_site import find_experts
from swarm.models.flash.experts.look_ahead import MIN_CHANCE, LookAhead, find_router, likeliest_experts
from tests import zoo
from tests.models.flash.experts.flash_zoo import flash_model, layers_of, resident_model
from tests.models.flash.experts.pools import EXPERTS, pool_of, visit


@pytest.fixture
def sure(monkeypatch):
    """Whatever is guessed is read ahead."""
    monkeypatch.setattr(look_ahead, "MIN_CHANCE", 0.0)


def test_the_router_beside_the_experts_is_found():
    block = layers_of(resident_model("qwen2_moe"))[1]
    plan = find_experts(block)
    assert plan is not None
    assert find_router(block, plan.modules["experts"], 4) is block.mlp.gate
    assert find_router(block, plan.modules["experts"], 5) is None
    block.mlp.other = nn.Linear(32, 4)
    assert find_router(block, plan.modules["experts"], 4) is None


@pytest.mark.usefixtures("sure")
def test_a_prompt_reads_nothing_ahead():
    flash = flash_model(resident_model("mixtral"), 0.5)
    with torch.inference_mode():
        flash.model(torch.tensor([zoo.PROMPTS[1]]))
    assert flash.pools[0].counters.look_ahead_reads == 0


@pytest.mark.usefixtures("sure")
def test_a_block_whose_router_is_not_known_is_left_out():
    resident = resident_model("mixtral")
    for block in layers_of(resident)[::2]:
        block.mlp.second = nn.Linear(32, 4)
    flash = flash_model(resident, 0.5)
    assert zoo.greedy_texts(flash.model, 4) == zoo.greedy_texts(resident, 4)
    assert flash.pools[0].counters.look_ahead_reads == 0


class Guessed:
    """Two blocks of eight experts, and routers whose weights name expert 3 for any input."""

    def __init__(self) -> None:
        self.pool = pool_of(6)
        self.modules = [SimpleNamespace(), SimpleNamespace()]
        self.routers = [nn.Linear(4, EXPERTS, bias=False) for _ in self.modules]
        for router in self.routers:
            nn.init.zeros_(router.weight)
            nn.init.ones_(router.weight[3])
        self.look_ahead = LookAhead(self.pool, self.modules, self.routers)

    def token(self, needed: int) -> None:
        """One token, which needs one expert in each block."""
        for block, router in enumerate(self.routers):
            router(torch.ones(1, 4))
            self.modules[block].next_block(np.array([needed]), 1, np.array([], dtype=np.int64))


@torch.no_grad()
def test_guesses_are_judged_and_experts_read_ahead_only_where_most_were_right():
    guessed = Guessed()
    for _ in range(10):
        guessed.token(needed=3)
    assert 0.5 < guessed.look_ahead.chance_B[1] < MIN_CHANCE
    assert guessed.pool.counters.look_ahead_reads == 0
    for _ in range(100):
        guessed.token(needed=3)
    assert guessed.look_ahead.chance_B[1] >= MIN_CHANCE
    assert guessed.look_ahead.chance_B[0] == 0.5, "nothing guesses for the first block"
    assert guessed.pool.counters.look_ahead_reads == 1
    visit(guessed.pool, 1, [3])
    assert guessed.pool.counters.look_ahead_hits == 1


@torch.no_grad()
def test_a_block_whose_guesses_are_wrong_reads_nothing_ahead():
    guessed = Guessed()
    for _ in range(200):
        guessed.token(needed=5)
    assert guessed.look_ahead.chance_B[1] < 0.1
    assert guessed.pool.counters.look_ahead_reads == 0


def test_the_likeliest_experts_of_several_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0], [0.0, 5.0, 0.0, 9.0]])
    np.testing.assert_array_equal(likeliest_experts(logits, 1), [0, 3])
    assert likeliest_experts(logits, 2).tolist() == [3, 0, 2, 1]
    assert sorted(likeliest_experts(logits, 9).tolist()) == [0, 1, 2, 3]
