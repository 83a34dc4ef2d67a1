"""What is announced for blocks on flash: what the cost model expects of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.costs import compute_speed
from swarm.models.flash.costs.cost_model import ExpertCosts, StreamedCosts
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.loading.flash_loading import FlashOptions, load_flash_span
from swarm.models.loading.flash_preparation import plan_for_flash
from swarm.server.throughput.flash_calibration import FlashCalibration
from swarm.server.throughput.flash_prediction import predict_speed
from tests import zoo


@pytest.fixture(autouse=True)
def _small_measurements(monkeypatch) -> None:
    monkeypatch.setattr(compute_speed, "WEIGHT_BYTES", 1 << 16)


def load(family: str, folder: Path, memory: int):
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, folder / family))
    span, root = Span(0, zoo.BLOCKS), folder / "cache"
    planned = plan_for_flash(checkpoint, span, torch.float32, root, exact=False)
    options = FlashOptions(memory, root, planned, FlashIo.CACHED)
    return load_flash_span(checkpoint, span, dtype=torch.float32, options=options)


def test_experts(tmp_path, caplog):
    model = load("mixtral", tmp_path, 200_000)
    with caplog.at_level("INFO"):
        costs = predict_speed(model)
    assert all(isinstance(block, ExpertCosts) for block in costs.blocks)
    assert {block.needed.tokens for block in costs.blocks} == {(0.5,)}  # two of four
    assert sum(block.slots for block in costs.blocks) <= model.flash.pools[0].buffer.slots
    assert "tokens/s alone" in caplog.text
    found = FlashCalibration(costs).throughput
    assert found.decode == pytest.approx(zoo.BLOCKS * costs.tokens_per_second())
    assert found.forward > 0
    model.flash.close()


def test_streamed_blocks_and_those_that_stay(tmp_path):
    model = load("llama", tmp_path, 150_000)
    costs = predict_speed(model)
    assert all(isinstance(block, StreamedCosts) for block in costs.blocks)
    read = sum(bool(block.stride) for block in costs.blocks)
    assert read == model.flash.stream.streamed
    assert 0 < read < zoo.BLOCKS
    weights = [block.resident_bytes + block.stride for block in costs.blocks]
    assert len(set(weights)) == 1, "the blocks of this model have the same size"
    model.flash.close()


def test_what_fits_reads_nothing(tmp_path):
    model = load("llama", tmp_path, 10**9)
    assert predict_speed(model).step().bytes == 0
    model.flash.close()
