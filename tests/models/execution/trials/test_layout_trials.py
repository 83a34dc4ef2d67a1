"""Which layout is chosen for a model, and that it is tried before it is used."""

from __future__ import annotations

import pytest
import torch

from swarm.models.attention.page_pool import PAGE_POSITIONS
from swarm.models.attention.paged_kernels import reference_kernel
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.trials import layout_trials
from swarm.models.execution.trials.layout_trials import choose_layout
from swarm.models.execution.trials.trial_runs import ScheduleRun
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
    monkeypatch.setattr(layout_trials, "agrees_with_reference", lambda kernel, pages: True)
    monkeypatch.setattr(layout_trials, "candidate_kernels", lambda device: (wrong_for_single_tokens,))
    assert choose_layout(model, "paged").strategy.layout == "contiguous"


@pytest.mark.parametrize("kernel", [refuses, ignores_windows, forgets])
def test_a_kernel_that_does_not_do_what_it_should_is_not_used(model, kernel, monkeypatch):
    """Also where this model is computed right with it, until one with a window, or a longer sequence, comes."""
    monkeypatch.setattr(layout_trials, "candidate_kernels", lambda device: (kernel,))
    assert choose_layout(model, "paged").strategy == ExecutionStrategy("contiguous")
    monkeypatch.setattr(layout_trials, "candidate_kernels", lambda device: (kernel, reference_kernel))
    paging = choose_layout(model, "paged").strategy.paging
    assert paging is not None
    assert paging.kernel is reference_kernel


def same(*args, **kwargs):
    return reference_kernel(*args, **kwargs)


def out_of_memory(kernel, keys, query_heads):
    raise torch.OutOfMemoryError("CUDA out of memory")


def only_others(kernel, keys, query_heads):
    if kernel is same:
        raise RuntimeError("not for this shape")
    return 1.0


@pytest.mark.parametrize(
    ("seconds", "taken", "said"),
    [
        (out_of_memory, same, "its results are right, and none could be timed"),
        (only_others, reference_kernel, "its results are right, and it is the fastest"),
    ],
)
def test_kernels_that_cannot_be_timed_do_not_end_the_loading(model, monkeypatch, seconds, taken, said):
    monkeypatch.setattr(layout_trials, "candidate_kernels", lambda device: (same, reference_kernel))
    monkeypatch.setattr(layout_trials, "step_seconds", seconds)
    strategy = choose_layout(model, "paged").strategy
    assert strategy.paging.kernel is taken
    assert (strategy.trials[-1].used, strategy.trials[-1].reason) == (True, said)
    if taken is reference_kernel:
        assert str(strategy.trials[-2]) == "pages by same: not used, it fails: not for this shape"


def test_kernels_are_timed_with_the_model_s_heads(model, monkeypatch):
    asked = []
    monkeypatch.setattr(layout_trials, "candidate_kernels", lambda device: (same, reference_kernel))
    monkeypatch.setattr(layout_trials, "step_seconds", lambda *args: asked.append(args[2]) or 1.0)
    choose_layout(model, "paged")
    assert asked == [model.module.config.num_attention_heads] * 2


def test_without_a_kernel_sequences_are_contiguous(model, monkeypatch):
    def missing(device):
        raise ImportError("no module named torch.nn.attention.varlen")

    monkeypatch.setattr(layout_trials, "candidate_kernels", missing)
    assert choose_layout(model, "paged").strategy == ExecutionStrategy("contiguous")


@pytest.mark.parametrize(
    ("device", "dtype", "paged"),
    [("cuda", torch.bfloat16, True), ("cuda", torch.float32, False), ("cpu", torch.bfloat16, False)],
)
def test_by_itself_a_model_is_in_pages_on_a_gpu_in_16_bits(model, monkeypatch, device, dtype, paged):
    tried = []
    run = ScheduleRun(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([False, True]))
    monkeypatch.setattr(layout_trials, "run_schedule", lambda model, longer=0: run)
    monkeypatch.setattr(layout_trials, "_try_pages", tried.append)
    model.device, model.dtype = torch.device(device), dtype
    choose_layout(model)
    assert [one.strategy.layout for one in tried] == (["contiguous"] if paged else [])


def test_trials_stay_within_a_models_table_of_positions(model, monkeypatch):
    """A position beyond a table would end a GPU's process."""
    tried = []
    schedule = layout_trials.run_schedule
    monkeypatch.setattr(
        layout_trials, "run_schedule", lambda model, longer=0: (tried.append(longer), schedule(model, longer))[1]
    )
    choose_layout(model, "paged")
    assert max(tried) == PAGE_POSITIONS
    tried.clear()
    model.cut.positions = 128
    choose_layout(model, "paged")
    assert set(tried) == {0}
