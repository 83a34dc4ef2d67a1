"""What options mean for a model on a machine: whether its weights go to flash."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.files import planned_blocks
from swarm.models.loading.flash_loading import load_flash_span
from swarm.server import memory_budget
from swarm.server.config import BlocksOption, ServerConfig
from swarm.server.flash_budget import FlashOption
from swarm.server.resolved_config import ResolvedConfig, resolve_config
from tests import zoo

CACHE_TOKENS = 16


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
            model=str(folder), blocks=BlocksOption.parse(blocks), device="cpu", cache_tokens=CACHE_TOKENS, **options
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
    assert "on flash" in config.weight_form


def test_what_cannot_be_read_from_flash_is_refused(resolve, weights):
    with pytest.raises(InvalidOption, match="--quant none instead of int8"):
        resolve(10 * weights, quant="int8", flash=FlashOption(memory=weights))


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
