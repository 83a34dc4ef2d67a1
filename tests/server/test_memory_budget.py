from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.footprint import MemoryFootprint
from swarm.server import memory_budget as memory
from swarm.server.limits import MAX_MEMORY_SHARE
from swarm.server.memory_budget import MemoryBudget, choose_quantization, resolve_device, resolve_quantization
from tests.models.checkpoints import packed_layouts

CPU = torch.device("cpu")

footprints = st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**5)), min_size=1, max_size=12).map(
    lambda blocks: MemoryFootprint(*map(tuple, zip(*blocks, strict=True)))
)


@given(footprints, st.integers(0, 10**11), st.integers(1, 20_000))
@settings(deadline=None)
def test_what_fits_fits_wherever_the_window_lies(footprint, free, tokens):
    blocks, budget = len(footprint.block_bytes), MemoryBudget(footprint, free, tokens)
    try:
        count = budget.blocks_that_fit()
    except NotEnoughMemory:
        heaviest = max(range(blocks), key=lambda block: footprint.span_bytes(block, block + 1, tokens))
        with pytest.raises(NotEnoughMemory):
            budget.check_fits(Span(heaviest, heaviest + 1))
        return
    assert 1 <= count <= blocks
    for start in range(blocks - count + 1):
        budget.check_fits(Span(start, start + count))


def test_the_cache_takes_room_too():
    footprint = MemoryFootprint((100,) * 10, (1,) * 10)
    assert MemoryBudget(footprint, 2000, 1).blocks_that_fit() == 10
    budget = MemoryBudget(footprint, 2000, 500)
    assert budget.blocks_that_fit() == 3
    budget.check_fits(Span(0, 3))
    with pytest.raises(NotEnoughMemory, match=r"blocks 0:4 take 2.4 KB .*500 tokens.*1.8 KB are free"):
        budget.check_fits(Span(0, 4))


def test_a_device_that_this_machine_has_not():
    for name in [
        "gpu",
        "",
        "cpu:cpu",
        "cuda:99",
        "xpu:7",
    ]:
        with pytest.raises(InvalidOption, match="--device"):
            resolve_device(name)


FORMS = {
    form: MemoryFootprint((weight,) * 8, (1,) * 8) for form, weight in (("none", 400), ("int8", 200), ("int4", 100))
}


def test_the_form_of_weights_that_nobody_asked_for():
    for wanted, free, expected in [
        (Span(0, 4), 2000, "none"),
        (Span(0, 4), 1000, "int8"),
        (Span(0, 4), 500, "int4"),
        (Span(0, 4), 100, "none"),
        (2, 1000, "none"),
        (2, 500, "int8"),
        (2, 300, "int4"),
        (99, 4000, "none"),
        (None, 4000, "none"),
        (None, 3000, "int8"),
        (None, 1000, "int8"),
        (None, 150, "int4"),
        (None, 10, "none"),
    ]:
        free = int(free / MAX_MEMORY_SHARE) + 10
        budgets = {form: MemoryBudget(needs, free, 1) for form, needs in FORMS.items()}
        assert choose_quantization(budgets, wanted) == expected


def test_where_the_cache_is_what_does_not_fit_weights_stay_exact():
    large_cache = {form: MemoryFootprint(needs.block_bytes, (10**6,) * 8) for form, needs in FORMS.items()}
    budgets = {form: MemoryBudget(needs, 4 * 10**6, 1) for form, needs in large_cache.items()}
    assert choose_quantization(budgets, None) == "none"


def test_the_form_is_said(caplog, monkeypatch):
    checkpoint = open_checkpoint()

    def resolved(requested: str, free: int = 1 << 40) -> tuple[str, str]:
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        caplog.clear()
        with caplog.at_level("INFO", logger="swarm"):
            form = resolve_quantization(requested, checkpoint, CPU, torch.float32, None, 16)
        return form, caplog.messages[-1]

    assert resolved("auto") == ("none", "Weights: not quantized; --quant says otherwise")
    assert resolved("auto", 10_000_000) == (
        "int8",
        "Weights: int8, because not all requested blocks fit in float32; --quant says otherwise",
    )
    assert resolved("nf4") == ("int4", "Weights: int4, as asked for (nf4 needs a GPU and bitsandbytes)")
    assert resolved("int8", 10) == ("int8", "Weights: int8, as asked for")


def test_packed_weights_stay_so_where_that_helps(tmp_path, monkeypatch):
    fp8, _ = packed_layouts.make("fp8 blocks", tmp_path / "fp8")
    int4, _ = packed_layouts.make("compressed-tensors int4", tmp_path / "int4")
    for folder, dtype, free, expected in [
        (fp8, torch.bfloat16, 1 << 40, "none"),
        (fp8, torch.bfloat16, 500_000, "packed"),
        (fp8, torch.float32, 500_000, "packed"),
        (int4, torch.bfloat16, 1 << 40, "packed"),
        (int4, torch.float32, 1 << 40, "none"),
    ]:
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert resolve_quantization("auto", open_checkpoint(folder), CPU, dtype, Span(0, 2), 16) == expected


def test_room_for_adapters():
    assert memory.adapter_memory(123, free=10) == 123
    assert memory.adapter_memory(0, free=10**12) == 0
    assert memory.adapter_memory(None, free=2 * 10**9) == 10**8
    assert memory.adapter_memory(None, free=10**12) == 1 << 30


def test_room_for_requests():
    assert memory.request_memory(123, free=10) == 123
    assert memory.request_memory(None, free=10 * 10**9) == 5 * 10**8
    assert memory.request_memory(None, free=10**13) == 8 << 30
    assert memory.request_memory(None, free=0) == 64 << 20
    # A machine of 2 GB that holds blocks of a 70B model: a peer can send two chunks of a prompt.
    assert memory.request_memory(None, free=2 * 10**9, hidden_size=8192, itemsize=2) > 2 * 1024 * 8192 * (2 * 2 + 10)
