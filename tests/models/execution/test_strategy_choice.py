"""Which strategy is chosen for a model, and that it is proven right before it is used."""

from __future__ import annotations

import logging

import pytest
import torch

from swarm.models.attention.page_pool import PAGE_POSITIONS
from swarm.models.attention.paged_attention import reference_kernel
from swarm.models.execution import strategy_choice
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.strategy_choice import ScheduleRun, choose_forward, choose_layout
from swarm.models.execution.traced_forward import FlatForward
from tests.models.execution.test_session_cache import load


@pytest.fixture
def model(tmp_path_factory) -> SpanModel:
    return load("llama", tmp_path_factory)


def test_a_cpu_keeps_sequences_contiguous_unless_told(model):
    assert model.strategy == ExecutionStrategy("contiguous")
    assert model.strategy.packed
    assert choose_layout(model, "contiguous").strategy == ExecutionStrategy("contiguous")
    padded = choose_layout(model, "padded").strategy
    assert padded == ExecutionStrategy("padded")
    assert not padded.packed
    paged = choose_layout(model, "paged").strategy
    assert paged.packed
    assert paged.paging is not None
    pool = paged.paging.pool
    assert (paged.paging.kernel, pool.page_size, pool.in_use) == (reference_kernel, PAGE_POSITIONS, 0)
    assert model.strategy == ExecutionStrategy("contiguous"), "the model that was given is as it was"


@pytest.mark.parametrize(
    ("family", "packed", "paged"),
    [("mistral", True, True), ("gemma2", True, False), ("deepseek_v3", True, False), ("mpt", False, False)],
)
def test_what_cannot_be_in_pages_takes_the_next_best_layout(family, packed, paged, tmp_path_factory):
    model = load(family, tmp_path_factory, layout="paged")
    assert (model.strategy.packed, model.strategy.paging is not None) == (packed, paged)


def refuses(*args, **kwargs):
    raise RuntimeError("this kernel wants head dimensions that are multiples of 8")


def ignores_windows(*args, **kwargs):
    return reference_kernel(*args, **{**kwargs, "window_size": (-1, 0)})


def forgets(*args, **kwargs):
    """Everything beyond the first page, which shows in long sequences alone."""
    lengths = kwargs["seqused_k"].clamp(max=PAGE_POSITIONS)
    return reference_kernel(*args, **kwargs) if (lengths == kwargs["seqused_k"]).all() else torch.zeros_like(args[0])


def wrong_for_single_tokens(*args, **kwargs):
    output = reference_kernel(*args, **kwargs)
    return 100 * torch.randn_like(output) if args[5] == 1 else output  # max_q


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_a_cache_whose_single_tokens_are_wrong_is_not_used(model, layout, monkeypatch):
    """Although most tokens of the schedule are of its prompts."""
    right = model.with_strategy(choose_layout(model, layout).strategy)
    assert right.strategy.layout == layout
    compute = SpanModel.run_packed

    def wrong(self, hidden, *args, **kwargs):
        output = compute(self, hidden, *args, **kwargs)
        return 100 * torch.randn_like(output) if len(hidden) <= 3 else output

    monkeypatch.setattr(SpanModel, "run_packed", wrong)
    assert choose_layout(model, layout).strategy.layout == "padded"
    monkeypatch.undo()
    monkeypatch.setattr(strategy_choice, "agrees_with_reference", lambda kernel, pages: True)
    monkeypatch.setattr(strategy_choice, "paged_kernel", lambda device: wrong_for_single_tokens)
    assert choose_layout(model, "paged").strategy.layout == "contiguous"


@pytest.mark.parametrize("kernel", [refuses, ignores_windows, forgets])
def test_a_kernel_that_does_not_do_what_it_should_is_not_used(model, kernel, monkeypatch):
    """Also where this model is computed right with it, until one with a window, or a longer sequence, comes."""
    monkeypatch.setattr(strategy_choice, "paged_kernel", lambda device: kernel)
    assert choose_layout(model, "paged").strategy == ExecutionStrategy("contiguous")


def test_a_torch_without_attention_over_pages(model, monkeypatch):
    monkeypatch.setattr(strategy_choice, "paged_kernel", lambda device: None)
    assert choose_layout(model, "paged").strategy == ExecutionStrategy("contiguous")


@pytest.mark.parametrize(
    ("device", "dtype", "paged"),
    [("cuda", torch.bfloat16, True), ("cuda", torch.float32, False), ("cpu", torch.bfloat16, False)],
)
def test_by_itself_a_model_is_in_pages_on_a_gpu_in_16_bits(model, monkeypatch, device, dtype, paged):
    tried = []
    run = ScheduleRun(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([False, True]))
    monkeypatch.setattr(strategy_choice, "run_schedule", lambda model, longer=0: run)
    monkeypatch.setattr(strategy_choice, "run_whole_texts", lambda model: run)
    monkeypatch.setattr(strategy_choice, "_in_pages", tried.append)
    model.device, model.dtype = torch.device(device), dtype
    choose_layout(model)
    assert [one.strategy.layout for one in tried] == (["contiguous"] if paged else [])


def test_trials_stay_within_a_models_table_of_positions(model, monkeypatch):
    """A position beyond a table would end a GPU's process."""
    tried = []
    schedule = strategy_choice.run_schedule
    monkeypatch.setattr(
        strategy_choice, "run_schedule", lambda model, longer=0: (tried.append(longer), schedule(model, longer))[1]
    )
    choose_layout(model, "paged")
    assert max(tried) == PAGE_POSITIONS
    tried.clear()
    model.cut.positions = 128
    choose_layout(model, "paged")
    assert set(tried) == {0}


def test_the_forward_of_small_blocks_is_traced(model, monkeypatch):
    before = model.strategy
    chosen = choose_forward(model)
    assert (chosen.strategy.layout, chosen.strategy.flat is not None) == ("contiguous", True)
    assert model.strategy is before, "the model that was given is as it was"
    paged = choose_layout(model, "paged")
    assert choose_forward(paged).strategy.paging is paged.strategy.paging
    monkeypatch.setattr(strategy_choice, "MAX_FLAT_BLOCK_BYTES", model.weight_bytes / model.span.length - 1)
    assert choose_forward(model).strategy == before


def test_a_flat_forward_that_is_wrong_or_cannot_be_traced_is_not_used(model, monkeypatch, caplog):
    monkeypatch.setattr(
        strategy_choice, "flat_forward", lambda model: FlatForward(lambda *inputs: (), (lambda h: h,) * 3)
    )
    assert choose_forward(model).strategy == model.strategy

    def fails(*arguments):
        raise LookupError("no such operation")

    monkeypatch.setattr(strategy_choice, "flat_forward", fails)
    with caplog.at_level(logging.INFO):
        assert choose_forward(model).strategy == model.strategy
    assert "A flat forward is not used for these blocks: it fails: LookupError('no such operation')" in caplog.text


def test_a_family_that_cannot_be_packed_keeps_its_modules(tmp_path_factory):
    model = load("falcon_alibi", tmp_path_factory)
    assert choose_forward(model).strategy == ExecutionStrategy("padded")
