"""What options mean for a model on a machine: whether its weights go to flash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import AdapterError, AdapterMismatch, InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.exits.model_head import head_bytes
from swarm.models.exits.trained_exits import BaseModel, ExitLens, TrainedExits
from swarm.models.flash import planned_blocks
from swarm.models.loading.flash_loading import load_flash_span
from swarm.server import memory_budget
from swarm.server.config import BlocksOption, ExitsOption, ServerConfig
from swarm.server.flash_budget import FlashOption
from swarm.server.limits import MAX_MEMORY_SHARE
from swarm.server.resolved_config import ResolvedConfig, resolve_config
from tests import zoo

CACHE_TOKENS = 16
BUFFER_BYTES = CACHE_TOKENS * 32 * 4
"""Hidden states of so many tokens, kept twice."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture
def weights(folder) -> int:
    """Bytes of all blocks."""
    return 4 * sum(open_checkpoint(folder).structure.block_parameters)


@pytest.fixture
def resolve(folder, monkeypatch):
    """Resolves options on a machine with so many free bytes."""

    def resolved(free: int, blocks: str = "0:6", **options) -> ResolvedConfig:
        monkeypatch.setattr(memory_budget, "free_memory", lambda device: free)
        config = ServerConfig(
            **{"model": str(folder), "device": "cpu", "cache_tokens": CACHE_TOKENS, **options},
            blocks=BlocksOption.parse(blocks),
        )
        return resolve_config(config)

    return resolved


@pytest.mark.parametrize("blocks", ["0:6", "6", "auto"])
def test_what_fits_stays_in_memory(resolve, weights, blocks):
    assert resolve(2 * weights, blocks).flash is None


def test_auto_uses_flash_for_blocks_that_fit_in_no_other_way(resolve, weights):
    config = resolve(weights * 3 // 4, quant="none")
    assert config.quantization == "none"
    config.flash.check_fits(Span(0, 6))
    assert config.flash.options(Span(0, 6)).memory < weights
    assert resolve(weights * 3 // 4, "auto", quant="none").flash is None  # fewer blocks fit
    assert resolve(weights * 3 // 4, quant="none", flash=FlashOption(off=True)).flash is None


def test_a_size_is_the_memory_for_weights_and_nothing_is_quantized(resolve, weights):
    config = resolve(10 * weights, "auto", flash=FlashOption(memory=weights * 2 // 3))
    assert config.quantization == "none"
    assert config.flash.options(Span(0, 4)).memory == weights * 2 // 3
    assert 1 <= config.flash.blocks_that_fit() <= 6


def test_a_size_that_does_not_fit_is_refused(resolve, weights):
    config = resolve(weights // 2, flash=FlashOption(memory=weights))
    with pytest.raises(NotEnoughMemory, match="give --flash another size"):
        config.flash.check_fits(Span(0, 6))


def test_blocks_are_planned_once(resolve, weights, tmp_path, monkeypatch):
    config = resolve(weights * 3 // 4, quant="none", cache_dir=tmp_path)

    def never(*args):
        raise AssertionError("the blocks were planned again")

    monkeypatch.setattr(planned_blocks, "_meta_layers", never)
    for span in (Span(0, 2), Span(1, 4)):  # a start, and a move
        model = load_flash_span(config.checkpoint, span, dtype=config.dtype, options=config.flash.options(span))
        model.flash.close()


def test_a_graphics_card_is_used_without_flash(resolve, weights, monkeypatch):
    """As far as this machine can tell: only the type of the device counts."""
    monkeypatch.setattr(memory_budget, "resolve_device", lambda requested: torch.device("cuda"))
    assert resolve(weights // 2, "6", quant="none").flash is None
    assert resolve(weights // 2, "auto", quant="none").flash is None
    with pytest.raises(InvalidOption, match="on a CPU only, not on cuda; add --device cpu"):
        resolve(weights // 2, flash=FlashOption(memory=weights // 4))


def test_what_exits_need_is_charged(resolve, folder, weights, tmp_path):
    """Without exits the blocks fit to the byte, and the head takes what some of them would have."""
    checkpoint = open_checkpoint(folder)
    exits, head = ExitsOption(), head_bytes(checkpoint, torch.float32)
    plain, charged = resolve(2 * weights), resolve(2 * weights, exits=exits)
    assert plain.budget.free - charged.budget.free == head > 0
    base = BaseModel(checkpoint.name, checkpoint.revision, 32, checkpoint.blocks)
    trained = TrainedExits(base, {2: ExitLens(torch.eye(32), torch.zeros(32))})
    trained.save(tmp_path)
    found = resolve(2 * weights, exits=exits, exits_from=tmp_path)
    assert found.budget.free == charged.budget.free
    # Each lens with the block behind which it reads: a span holds those, and no others.
    plain_bytes, bytes_now = plain.budget.footprint.block_bytes, found.budget.footprint.block_bytes
    lens = 4 * (32 * 32 + 32)
    assert [now - before for now, before in zip(bytes_now, plain_bytes, strict=True)] == [0, lens, 0, 0, 0, 0]
    assert found.trained_exits.lenses == {2}


def test_only_exits_that_can_be_offered_are_charged(resolve, folder, weights, tmp_path):
    checkpoint = open_checkpoint(folder)
    base = BaseModel(checkpoint.name, checkpoint.revision, 32, checkpoint.blocks)
    TrainedExits(base, {block: ExitLens(torch.eye(32), torch.zeros(32)) for block in range(1, 6)}).save(tmp_path)
    plain = resolve(2 * weights).budget

    def charged(blocks: str, *exits: int) -> list[int]:
        budget = resolve(2 * weights, blocks, exits=ExitsOption(exits or None), exits_from=tmp_path).budget
        changed = zip(budget.footprint.block_bytes, plain.footprint.block_bytes, strict=True)
        assert (budget.free < plain.free) == any(now > before for now, before in changed)
        return [block for block in range(6) if budget.footprint.block_bytes[block] > plain.footprint.block_bytes[block]]

    assert charged("auto") == charged("6") == [0, 1, 2, 3, 4]
    assert charged("auto", 2, 4) == [1, 3]
    assert charged("2:4") == [2, 3]
    assert charged("2:4", 1, 2) == []  # and no head either: a span that was asked for is kept


def test_exits_are_no_reason_for_flash(resolve, folder, weights):
    """With the head, memory would hold less than was asked for; flash, which holds more, has no exits."""
    head = head_bytes(open_checkpoint(folder), torch.float32)
    needed = resolve(2 * weights).budget.footprint.span_bytes(0, 6, CACHE_TOKENS)
    free = int(needed / MAX_MEMORY_SHARE) + 2 + BUFFER_BYTES
    assert resolve(free, quant="none").flash is None
    assert resolve(free - 16, quant="none").flash is not None
    for quant in ("none", "auto"):
        with pytest.raises(NotEnoughMemory, match="but not beside what --exits needs"):
            resolve(free, quant=quant, exits=ExitsOption())
    enough = resolve(free + head, quant="none", exits=ExitsOption())
    enough.budget.check_fits(Span(0, 6))
    assert enough.flash is None


def test_what_sessions_keep_beside_their_cache_is_not_for_blocks(resolve, weights):
    assert resolve(2 * weights).budget.free == 2 * weights - BUFFER_BYTES


def test_on_a_gpu_they_are_in_other_memory(folder):
    checkpoint = open_checkpoint(folder)
    for device, expected in (("cpu", BUFFER_BYTES), ("cuda", 0)):
        taken = memory_budget.session_buffer_bytes(checkpoint, torch.device(device), torch.float32, CACHE_TOKENS)
        assert taken == expected


def test_exits_that_cannot_be_used_are_refused(resolve, weights, tmp_path):
    with pytest.raises(InvalidOption, match="give both"):
        resolve(2 * weights, exits_from=tmp_path)
    with pytest.raises(InvalidOption, match="its last exit is in front of block 5"):
        resolve(2 * weights, exits=ExitsOption((2, 6)))
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        resolve(2 * weights, exits=ExitsOption(), exits_from=tmp_path)
    TrainedExits(BaseModel("other", "other", 32, 6), {2: ExitLens(torch.eye(32), torch.zeros(32))}).save(tmp_path)
    with pytest.raises(AdapterMismatch, match="was trained for revision other of other"):
        resolve(2 * weights, exits=ExitsOption(), exits_from=tmp_path)
