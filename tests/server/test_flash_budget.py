"""`--flash`: whether blocks go to flash, and what then fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory, NotEnoughSpace
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.block_plan import BlockPlan, RecordKind
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.preparation import SPARE_BYTES
from swarm.models.flash.planned_blocks import BlockPlanner, PlannedBlock, plan_span
from swarm.models.flash.records import RecordLayout
from swarm.server.flash_budget import FlashBudget, FlashFootprint, FlashOption, flash_footprint, wants_flash
from tests import zoo
from tests.models.flash.files.preparations import set_free_space

BLOCK = RecordLayout.of({"w": (1, 25_000)}, {"w": 0}, torch.float32)
"""One record of about 100 KB."""
EXPERTS = RecordLayout.of({"w": (10, 25_000)}, {"w": 0}, torch.float32)


def footprint(kind: RecordKind, layout: RecordLayout, blocks: int = 8) -> FlashFootprint:
    return FlashFootprint([PlannedBlock(BlockPlan(kind, {}, {}), layout, {}, 1000)] * blocks, 10)


def budget(kind=RecordKind.BLOCK, layout=BLOCK, memory=None, usable=10**9, cache_tokens=0, root=None) -> FlashBudget:
    free = -(-usable * 10 // 9)  # 0.9 of it are usable
    packed = PackedModel(root or Path("/nowhere"), "model", "0", torch.float32)
    return FlashBudget(footprint(kind, layout), free, cache_tokens, memory, packed)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("auto", FlashOption()),
        ("off", FlashOption(off=True)),
        ("8GB", FlashOption(memory=8 * 10**9)),
        ("512 MiB", FlashOption(memory=512 << 20)),
    ],
)
def test_the_option_is_read(text, option):
    assert FlashOption.parse(text) == option


@pytest.mark.parametrize("text", ["", "8 GBit", "-1GB"])
def test_other_options_are_refused(text):
    with pytest.raises(InvalidOption, match="--flash"):
        FlashOption.parse(text)


@given(st.booleans(), st.sampled_from(["cpu", "cuda", "mps"]), st.sampled_from(["none", "int8", "int4"]))
def test_auto_is_for_what_fits_in_no_other_way(fits, device, quantization):
    assert wants_flash(FlashOption(), device, quantization, fits) == (
        not fits and device == "cpu" and quantization == "none"
    )
    assert not wants_flash(FlashOption(off=True), device, quantization, fits)


def test_a_size_is_used_even_if_everything_fits_and_refused_where_nothing_can_be_read():
    asked = FlashOption(memory=10**6)
    assert wants_flash(asked, "cpu", "none", True)
    with pytest.raises(InvalidOption, match=r"only, not on cuda; add --device cpu"):
        wants_flash(asked, "cuda", "none", True)
    with pytest.raises(InvalidOption, match=r"use --quant none instead of int8"):
        wants_flash(asked, "cpu", "int8", False)


def test_twice_the_blocks_that_memory_holds():
    assert budget(memory=4 * BLOCK.file_bytes + 10_000).blocks_that_fit() == 8
    assert budget(memory=2 * BLOCK.file_bytes + 10_000).blocks_that_fit() == 4


def test_four_times_the_experts():
    assert budget(RecordKind.EXPERTS, EXPERTS, memory=2 * EXPERTS.file_bytes + 10_000).blocks_that_fit() == 8
    assert budget(RecordKind.EXPERTS, EXPERTS, memory=EXPERTS.file_bytes + 10_000).blocks_that_fit() == 4


def test_the_attention_cache_takes_its_part():
    room = 4 * BLOCK.file_bytes + 10_000
    assert budget(usable=room, cache_tokens=0).blocks_that_fit() == 8
    # 20 KB of cache a block: of eight blocks, as much as 1.6 blocks.
    assert budget(usable=room, cache_tokens=2000).blocks_that_fit() == 5
    with pytest.raises(NotEnoughMemory, match="lower --cache-tokens"):
        budget(memory=room, usable=room + 100, cache_tokens=2000).check_fits(Span(0, 1))


def test_what_was_asked_for_is_served_with_less_memory_than_it_pays_with():
    few = budget(memory=2 * BLOCK.file_bytes + 10_000)
    few.check_fits(Span(0, 8))
    assert few.options(Span(0, 8)).memory == 2 * BLOCK.file_bytes + 10_000
    with pytest.raises(NotEnoughMemory, match=r"blocks 0:8 on flash take at least"):
        budget(memory=2 * BLOCK.file_bytes).check_fits(Span(0, 8))


@given(st.integers(0, 3 * 10**6), st.integers(0, 5000))
def test_what_is_counted_can_be_served(usable, cache_tokens):
    one = budget(usable=usable, cache_tokens=cache_tokens)
    try:
        count = one.blocks_that_fit()
    except NotEnoughMemory:
        return
    for start in range(8 - count + 1):
        one.check_fits(Span(start, start + count))


@pytest.mark.parametrize(
    ("family", "exact", "sparse"), [("llama", False, False), ("opt", False, True), ("opt", True, False)]
)
def test_a_footprint_needs_no_weights(family, exact, sparse, tmp_path):
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, tmp_path / family))
    planned = plan_span(checkpoint, Span(0, zoo.BLOCKS), torch.float32, BlockPlanner(exact).plan)
    found = flash_footprint(checkpoint, torch.float32, planned)
    assert len(found.blocks) == zoo.BLOCKS
    assert found.sparse(0, zoo.BLOCKS) is sparse
    assert found.least_bytes(0, zoo.BLOCKS) < found.worthwhile_bytes(0, zoo.BLOCKS)


@pytest.fixture
def on_drive(tmp_path, monkeypatch):
    """A budget for eight blocks in memory, on a drive with room for so many."""

    def made(blocks: int, prepared: Span | None = None) -> FlashBudget:
        one = budget(memory=4 * BLOCK.file_bytes + 10_000, root=tmp_path)
        size = one.footprint.blocks[0].size
        for block in range(prepared.start, prepared.end) if prepared else ():
            one.packed.folder.mkdir(parents=True, exist_ok=True)
            one.packed.files(block, one.footprint.blocks[block].plan.kind).records.write_bytes(bytes(size))
        set_free_space(monkeypatch, SPARE_BYTES + blocks * size)
        return one

    return made


def test_fewer_blocks_are_served_if_the_drive_holds_no_more(on_drive, caplog):
    one = on_drive(3)
    assert one.blocks_that_fit() == 3
    assert "8 blocks would pay, and the drive of" in caplog.text
    assert len(one.windows(3)) == 6
    with pytest.raises(NotEnoughSpace, match="blocks 2:6 of model need"):
        one.check_fits(Span(2, 6))


def test_prepared_blocks_need_no_more_space(on_drive):
    one = on_drive(1, prepared=Span(2, 5))
    assert one.blocks_that_fit() == 4
    assert one.windows(4) == [Span(1, 5), Span(2, 6)]
    one.check_fits(Span(1, 5))


def test_blocks_of_which_only_some_can_be_served():
    """The first block is streamed and larger than memory; the others are mixtures."""
    large = RecordLayout.of({"w": (1, 250_000)}, {"w": 0}, torch.float32)
    plans = [PlannedBlock(BlockPlan(RecordKind.BLOCK, {}, {}), large, {}, 1000)]
    plans += [PlannedBlock(BlockPlan(RecordKind.EXPERTS, {}, {}), EXPERTS, {}, 1000)] * 3
    one = dataclasses.replace(budget(memory=2 * EXPERTS.stride + 5000), footprint=FlashFootprint(plans, 10))
    assert one.blocks_that_fit() == 1
    assert one.windows(1) == [Span(1, 2), Span(2, 3), Span(3, 4)]
    assert one.fits(3)
    assert not one.fits(4)
    assert not one.fits(Span(0, 1))
    with pytest.raises(NotEnoughMemory, match="blocks 0:1 on flash"):
        one.check_fits(Span(0, 1))
