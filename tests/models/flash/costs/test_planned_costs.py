"""What blocks will cost, before they are loaded: the same as when they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import NotEnoughMemory
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.costs.planned_costs import planned_costs, whole_bytes
from swarm.models.flash.costs.span_costs import block_costs
from swarm.models.flash.files.planned_blocks import plan_span
from swarm.models.flash.plans.block_choice import BlockPlanner
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.loading.flash_loading import FlashOptions, load_flash_span
from tests import zoo
from tests.slow import slow_except

WHOLE = Span(0, zoo.BLOCKS)
EXPERTS_PER_TOKEN = 2


def planned(family: str, folder, exact: bool = True):
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, folder / family))
    return checkpoint, plan_span(checkpoint, WHOLE, torch.float32, BlockPlanner(exact).plan)


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("family", slow_except(["mixtral", "llama", "deepseek_v3", "qwen2_moe"], "deepseek_v3"))
def test_what_is_planned_is_what_is_loaded(family, share, tmp_path):
    checkpoint, plans = planned(family, tmp_path)
    blocks = list(plans.values())
    memory = int(share * whole_bytes(blocks))
    options = FlashOptions(memory, tmp_path / "cache", plans, FlashIo.CACHED)
    model = load_flash_span(checkpoint, WHOLE, dtype=torch.float32, options=options)
    expected, found = block_costs(model.flash, EXPERTS_PER_TOKEN), planned_costs(blocks, memory)
    # Some routers have a few numbers in a buffer, which does not count as weights once it is loaded.
    resident = [one.resident_bytes for one in expected]
    assert [one.resident_bytes for one in found] == pytest.approx(resident, rel=0.01)
    assert [dataclasses.replace(one, resident_bytes=0) for one in found] == [
        dataclasses.replace(one, resident_bytes=0) for one in expected
    ]
    assert model.flash.weight_bytes <= memory
    model.flash.close()


def test_nothing_is_read_with_enough_memory(tmp_path):
    blocks = list(planned("deepseek_v3", tmp_path)[1].values())
    for cost, block in zip(planned_costs(blocks, whole_bytes(blocks)), blocks, strict=True):
        if block.experts_per_token:
            assert cost.slots == cost.records
        else:
            assert cost.stride == 0


def test_experts_a_token_are_those_of_the_router(tmp_path):
    assert [one.experts_per_token for one in planned("deepseek_v3", tmp_path)[1].values()] == [0, 0, 0, 0, 2, 2]


def test_blocks_whose_cost_is_not_known_before(tmp_path):
    blocks = list(planned("opt", tmp_path, exact=False)[1].values())
    with pytest.raises(ValueError, match="predictors"):
        planned_costs(blocks, 10**9)


def test_too_little_memory_is_refused(tmp_path):
    with pytest.raises(NotEnoughMemory):
        planned_costs(list(planned("mixtral", tmp_path)[1].values()), 1000)
