"""Adapters of several sessions in one forward, against each session alone and against adapters merged into weights."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.errors import AdapterRefused
from swarm.models.adapters import layer_hooks
from swarm.models.adapters.adapter_batch import (
    NO_ADAPTER,
    ActiveAdapters,
    AdapterBatch,
    AdapterSegment,
    AdapterWeights,
    active_adapters,
)
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting.model_inspection import linear_size
from swarm.models.execution.session_cache import SessionCache, advance_steps, forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.models.weights.frozen_linear import FrozenLinear
from tests import zoo
from tests.models.execution.test_session_cache import close, load, load_as, slow

torch.set_num_threads(1)

SPAN, HIDDEN = Span(1, 4), 32
JUDGED = ("llama", "qwen3", "gemma3_text", "opt", "bloom", "mixtral", "gpt2")
LAYOUTS = ("paged", "contiguous", "padded")


def linears(model: SpanModel, block: int) -> dict[str, tuple[int, int]]:
    """The linear modules of a block, by name: inputs and outputs."""
    named = {name: layer_hooks._linear_size(module) for name, module in model.adapted._layers[block].named_modules()}
    return {name: size for name, size in named.items() if size is not None}


def make_part(model: SpanModel, block: int, seed: int = 0, rank: int = 3, positions: int = 3) -> BlockAdapterWeights:
    """A prompt, and factors of all linear modules."""
    random = torch.Generator().manual_seed(100 * seed + block)
    factors = tuple(
        LoraFactors(
            name, torch.randn(rank, inputs, generator=random), 0.2 * torch.randn(outputs, rank, generator=random)
        )
        for name, (inputs, outputs) in linears(model, block).items()
    )
    assert len(factors) >= 4
    return BlockAdapterWeights(torch.randn(positions, model.hidden_size, generator=random), factors)


def make_adapter(model: SpanModel, seed: int = 0, **options: int) -> AdapterWeights:
    return {block: make_part(model, block, seed, **options) for block in range(model.span.start, model.span.end)}


def rows_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=LAYOUTS)
def llama(request, tmp_path_factory) -> SpanModel:
    return load_as(request.param, "llama", tmp_path_factory)


@pytest.mark.parametrize("family", JUDGED)
def test_factors_are_what_would_be_added_to_the_weights(family, tmp_path_factory):
    model, merged = (load(family, tmp_path_factory, packed=packed) for packed in (True, False))
    adapter = {block: replace(part, prompt=None) for block, part in make_adapter(model).items()}
    for block, part in adapter.items():
        model.adapted.validate(block, part)
        for one in part.factors:
            module = merged.adapted._layers[block].get_submodule(one.module)
            added = one.up @ one.down
            module.weight.data += added if isinstance(module, torch.nn.Linear) else added.T
    hidden = rows_of(9)
    layout = StepLayout((0, 0), (4, 5))
    expected = forward_without_cache(merged, hidden, layout)
    close(forward_without_cache(model, hidden, layout, adapter), expected)
    assert (forward_without_cache(model, hidden, layout) - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("family", JUDGED)
def test_prompts_are_added_to_what_enters_a_block(family, tmp_path_factory):
    """Blocks one after the other, with prompts put in by hand, as a reference; the span in parts, too."""
    model = load(family, tmp_path_factory)
    adapter = {block: BlockAdapterWeights(part.prompt) for block, part in make_adapter(model).items()}
    counts = (2, 5)  # one row is shorter than the prompt
    hidden = rows_of(sum(counts))
    expected = hidden
    for block in range(SPAN.start, SPAN.end):
        rows = [row.clone() for row in expected.split(counts)]
        for row in rows:
            row[:3] += adapter[block].prompt[: len(row)]
        expected = forward_without_cache(
            model.narrowed(Span(block, block + 1)), torch.cat(rows), StepLayout((0, 0), counts)
        )
    layout = StepLayout((0, 0), counts)
    close(forward_without_cache(model, hidden, layout, adapter), expected)
    first, rest = (model.narrowed(span) for span in (Span(1, 2), Span(2, 4)))
    close(forward_without_cache(rest, forward_without_cache(first, hidden, layout, adapter), layout, adapter), expected)


@given(st.data())
@settings(slow, max_examples=60)
def test_any_sessions_together_are_as_each_alone(llama, data):
    """Sessions with adapters of their own, the same ones, or none, in portions, against each computed whole, alone."""
    kinds = [NO_ADAPTER, make_adapter(llama, 1), make_adapter(llama, 2, rank=2, positions=5)]
    kinds.append({2: make_part(llama, 2, 3)})
    kinds.append({1: BlockAdapterWeights(kinds[1][1].prompt), 3: replace(kinds[2][3], prompt=None)})
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    caches = [SessionCache(llama, adapter) for adapter in chosen]
    # Which positions the model is told makes no difference here, but the prompts must not go by them.
    offsets = [data.draw(st.none() | st.just((2, 0))) for _ in chosen]
    histories: list[list[torch.Tensor]] = [[rows_of(0)] * 2 for _ in chosen]
    for turn in range(data.draw(st.integers(1, 4))):
        works, whole = [], []
        for number, cache in enumerate(caches):
            counts = tuple(data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2)))
            starts = cache.lengths or (0, 0)
            if not sum(counts):
                continue
            hidden = rows_of(sum(counts), 10 * turn + number)
            news = hidden.split(counts)
            histories[number] = [torch.cat(pair) for pair in zip(histories[number], news, strict=True)]
            works.append(cache.start_step(hidden, StepLayout(starts, counts, None, offsets[number])))
            whole.append((number, counts))
        while portions := [(work, data.draw(st.integers(1, work.tokens_left))) for work in works if work.tokens_left]:
            advance_steps(portions)
        for work, (number, counts) in zip(works, whole, strict=True):
            work.commit()
            expected = [
                alone(llama, row, chosen[number])[len(row) - count :]
                for row, count in zip(histories[number], counts, strict=True)
                if count
            ]
            close(work.output, torch.cat(expected))


def alone(model: SpanModel, row: torch.Tensor, adapter: AdapterWeights) -> torch.Tensor:
    """One whole row as a rectangle."""
    with model.adapted.activate([AdapterSegment(adapter, range(len(row)))]):
        return model.forward(row.unsqueeze(0))[0]


def test_nothing_is_added_in_another_thread_or_afterwards(llama):
    adapter, hidden, layout = make_adapter(llama), rows_of(4), StepLayout((0,), (4,))
    plain = forward_without_cache(llama, hidden, layout)
    found = []
    with llama.adapted.activate([AdapterSegment(adapter, range(4))]):
        thread = threading.Thread(target=lambda: found.append(forward_without_cache(llama, hidden, layout)))
        thread.start()
        thread.join()
        with ActiveAdapters(None):
            found.append(forward_without_cache(llama, hidden, layout))
        assert active_adapters() is not None
    assert active_adapters() is None
    for output in (*found, forward_without_cache(llama, hidden, layout)):
        close(output, plain)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantized_blocks(quant, tmp_path_factory):
    """An adapter adds the same to a quantized block: what it adds is not quantized."""
    folder = zoo.make_checkpoint("opt_projected", tmp_path_factory.mktemp("wide"))  # hidden 64, a group of int4
    model = load_span(open_checkpoint(folder), SPAN, dtype=torch.float32, device=torch.device("cpu"), quant=quant)
    assert any(isinstance(module, FrozenLinear) for module in model.module.modules())
    layer = model.adapted._layers[2]
    name = next(name for name, module in layer.named_modules() if isinstance(module, FrozenLinear))
    module = layer.get_submodule(name)
    factors = LoraFactors(name, torch.randn(2, module.in_features), torch.randn(module.out_features, 2))
    adapter = {2: BlockAdapterWeights(None, (factors,))}
    model.adapted.validate(2, adapter[2])
    hidden = torch.randn(5, module.in_features)
    plain = module(hidden)
    with model.adapted.activate([AdapterSegment(adapter, range(5))]):
        close(module(hidden), plain + hidden @ factors.down.T @ factors.up.T)


def factors(
    module: str = "self_attn.q_proj", down: tuple = (2, HIDDEN), up: tuple = (HIDDEN, 2)
) -> BlockAdapterWeights:
    return BlockAdapterWeights(None, (LoraFactors(module, torch.zeros(down), torch.zeros(up)),))


def test_what_does_not_fit_is_refused(llama):
    for block, part, message in [
        (0, factors(), "block 0, which this server does not hold"),
        (4, factors(), "block 4, which"),
        (1, BlockAdapterWeights(torch.zeros(2, HIDDEN + 1)), "33 values wide, but the model's hidden size is 32"),
        (1, factors("self_attn.nothing"), "no linear module 'self_attn.nothing'; it has self_attn.q_proj"),
        (1, factors("self_attn"), "no linear module 'self_attn'"),
        (1, factors(""), "no linear module ''"),
        (1, factors("input_layernorm"), "no linear module"),
        (1, factors("self_attn.q_proj.weight"), "no linear module"),
        (1, factors("__class__"), "no linear module"),
        (1, factors("x" * 200), "no linear module"),
        (
            1,
            factors(down=(2, HIDDEN - 1)),
            r"A \(2, 31\) and B \(32, 2\); the module needs A \[rank, 32\] and B \[32, rank\]",
        ),
        (1, factors(up=(HIDDEN + 1, 2)), "the module needs"),
        (1, factors(up=(HIDDEN, 3)), "the module needs"),
        (1, BlockAdapterWeights(None, factors().factors * 2), "names the same module twice"),
    ]:
        with pytest.raises(AdapterRefused, match=message):
            llama.adapted.validate(block, part)


def test_modules_that_see_other_tokens_are_computed_alone(tmp_path_factory):
    """DeepSeek expands the whole past with a linear module: one adapter at a time, and the right one."""
    model = load("deepseek_v3", tmp_path_factory)
    name = "self_attn.kv_b_proj"
    inputs, outputs = linear_size(model.adapted._layers[1].get_submodule(name))
    both = [
        {1: BlockAdapterWeights(None, (LoraFactors(name, torch.randn(2, inputs), torch.randn(outputs, 2)),))}
        for _ in range(2)
    ]
    hidden = rows_of(4)
    caches = [SessionCache(model, adapter) for adapter in both]
    works = [cache.start_step(hidden, StepLayout((0,), (4,))) for cache in caches]
    if model.strategy.packed:
        with pytest.raises(AdapterRefused, match="not computed token by token"):
            advance_steps([(work, 4) for work in works])
    for work, adapter in zip(works, both, strict=True):
        advance_steps([(work, 4)])
        close(work.output, alone(model, hidden, adapter))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-2, 6), max_size=5)), min_size=1, max_size=4))
def test_each_token_gets_its_own_adapter(drawn):
    """Prompts and factors by index, against one token after the other."""
    parts = [
        BlockAdapterWeights(torch.randn(4, 6), (LoraFactors("m", torch.randn(2, 6), torch.randn(5, 2)),)),
        BlockAdapterWeights(torch.randn(2, 6)),
    ]
    kinds: list[AdapterWeights] = [{0: parts[0]}, {0: parts[1]}, NO_ADAPTER]
    batch = AdapterBatch([AdapterSegment(kinds[kind], positions) for kind, positions in drawn])
    owners = [(kind, position) for kind, positions in drawn for position in positions]
    hidden, output = torch.randn(len(owners), 1, 6), torch.randn(len(owners), 1, 5)
    prompted = layer_hooks.add_prompts(batch, 0, hidden)
    added = layer_hooks.add_lora(batch, 0, "m", hidden, output)
    for token, (kind, position) in enumerate(owners):
        expected = hidden[token]
        if kind < 2 and 0 <= position < len(parts[kind].prompt):
            expected = expected + parts[kind].prompt[position]
        torch.testing.assert_close(prompted[token], expected)
        one = parts[0].factors[0]
        low = hidden[token] @ one.down.T @ one.up.T if kind == 0 else 0
        torch.testing.assert_close(added[token], output[token] + low)
    assert layer_hooks.add_lora(batch, 0, "other", hidden, output) is output
    assert layer_hooks.add_prompts(batch, 1, hidden) is hidden
