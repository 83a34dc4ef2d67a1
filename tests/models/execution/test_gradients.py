"""Gradients through a span against torch's own autograd through the plain transformers model, sequence by sequence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.data_structures import Span, StepLayout
from swarm.models.adapters.adapter_batch import AdapterWeights
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting import cut_layers
from swarm.models.execution import gradients
from swarm.models.execution.gradients import SpanGradients, compute_gradients, forward_with_graph
from swarm.models.execution.session_cache import forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.models.adapters.test_layer_hooks import JUDGED, make_adapter

torch.set_num_threads(1)

SPAN, HIDDEN = Span(1, 4), 32
TOLERANCE = 1e-4
LAYOUT = StepLayout((0, 0, 0, 0), (5, 9, 0, 2), None, (0, 2, 0, 1))
"""Sequences of different lengths, longer than the zoo's windows and shorter than the prompts, one without tokens."""

FAMILIES = (*JUDGED, "deepseek_v3", "qwen3_5_text")
"""Those that have to be exact, latents, and states."""

STATES_TOLERANCE = 1e-3
"""Padding changes how sums of many small numbers are rounded."""


class Local:
    """The whole model as transformers loads it, with an adapter written out by hand on the blocks of the span."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).base_model.requires_grad_(False)
        _, owner, name = cut_layers.find_layers(self.model, zoo.BLOCKS)
        self.layers = getattr(owner, name)

    def gradients(
        self, inputs: torch.Tensor, ends: torch.Tensor, layout: StepLayout, adapter: AdapterWeights, span: Span = SPAN
    ) -> Any:
        """Outputs, and gradients of the inputs and of all tensors of the adapter."""
        leaf = inputs.clone().requires_grad_()
        leaves = {block: part.map_tensors(lambda one: one.clone().requires_grad_()) for block, part in adapter.items()}
        offsets = layout.offsets or (0,) * layout.sequences
        rows = zip(leaf.split(layout.counts), offsets, strict=True)
        output = torch.cat([self.run(row, offset, leaves, span) for row, offset in rows if len(row)])
        tensors = [tensor for part in leaves.values() for tensor in part.tensors]
        return output.detach(), torch.autograd.grad(output, [leaf, *tensors], ends)

    def run(self, row_TH: torch.Tensor, offset: int, adapter: AdapterWeights, span: Span) -> torch.Tensor:
        found: list[torch.Tensor] = []
        handles = [
            self.layers[span.start].register_forward_pre_hook(replaced(row_TH.unsqueeze(0)), with_kwargs=True),
            self.layers[span.end - 1].register_forward_hook(lambda module, args, output: found.append(first(output))),
        ]
        for block, part in adapter.items():
            handles.append(self.layers[block].register_forward_pre_hook(prompted(part.prompt), with_kwargs=True))
            for one in part.factors:
                module = self.layers[block].get_submodule(one.module)
                handles.append(module.register_forward_hook(added(one.down, one.up)))
        arguments = {}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            arguments["position_ids"] = torch.arange(offset, offset + len(row_TH)).unsqueeze(0)
        self.model(torch.ones(1, len(row_TH), dtype=torch.long), use_cache=False, **arguments)
        for handle in handles:
            handle.remove()
        return found[0][0]


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def replaced(hidden: torch.Tensor) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    return hook


def prompted(prompt: torch.Tensor) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        length = min(len(prompt), hidden.shape[1])
        hidden = torch.cat([hidden[:, :length] + prompt[:length].to(hidden.dtype), hidden[:, length:]], dim=1)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    return hook


def added(down: torch.Tensor, up: torch.Tensor) -> Any:
    return lambda module, args, output: output + (args[0].to(down.dtype) @ down.T @ up.T).to(output.dtype)


def make(family: str, factory: Any, dtype: torch.dtype = torch.float32, quant: str = "none") -> tuple[Path, SpanModel]:
    folder = zoo.make_checkpoint(family, factory.mktemp("checkpoint"))
    return folder, load_span(open_checkpoint(folder), SPAN, dtype=dtype, device=torch.device("cpu"), quant=quant)


def drawn(model: SpanModel, seed: int, layout: StepLayout = LAYOUT) -> torch.Tensor:
    return torch.randn(layout.tokens, model.hidden_size, generator=torch.Generator().manual_seed(seed))


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * other.norm()
        assert other.norm() > 0


def all_of(gradients: SpanGradients) -> list[torch.Tensor]:
    return [gradients.inputs, *(tensor for block in sorted(gradients.parts) for tensor in gradients.parts[block])]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_local_model(family, tmp_path_factory):
    folder, model = make(family, tmp_path_factory)
    inputs, ends, adapter = drawn(model, 1), drawn(model, 2), make_adapter(model)
    output, expected = Local(folder).gradients(inputs, ends, LAYOUT, adapter)
    tolerance = STATES_TOLERANCE if family in zoo.HYBRIDS else TOLERANCE
    assert_equal([forward_without_cache(model, inputs, LAYOUT, adapter)], [output], tolerance)
    assert_equal(all_of(compute_gradients(model, inputs, ends, LAYOUT, adapter)), expected, tolerance)
    # Through the graph of a client that computes these blocks itself.
    leaf = inputs.clone().requires_grad_()
    leaves = {block: part.map_tensors(lambda one: one.clone().requires_grad_()) for block, part in adapter.items()}
    computed = forward_with_graph(model, leaf, LAYOUT, leaves)
    assert_equal([computed.detach()], [output], tolerance)
    computed.backward(ends)
    assert_equal([leaf.grad, *(one.grad for part in leaves.values() for one in part.tensors)], expected, tolerance)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, SpanModel]:
    return make("llama", tmp_path_factory)


def test_part_of_a_span_ignores_what_is_for_other_blocks(llama):
    _, model = llama
    inputs, ends, adapter = drawn(model, 1), drawn(model, 2), make_adapter(model)
    part = model.narrowed(Span(2, 4))
    found = compute_gradients(part, inputs, ends, LAYOUT, adapter)
    assert set(found.parts) == {2, 3}
    mine = {block: adapter[block] for block in (2, 3)}
    assert_equal(all_of(found), all_of(compute_gradients(part, inputs, ends, LAYOUT, mine)), 1e-6)


def test_nothing_is_left_behind(llama):
    """No gradients of weights, no graph, and forwards for inference go on."""
    _, model = llama
    inputs, ends, adapter = drawn(model, 1), drawn(model, 2), make_adapter(model)
    before = forward_without_cache(model, inputs, LAYOUT, adapter)
    found = compute_gradients(model, inputs, ends, LAYOUT, adapter)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    for tensor in [*all_of(found), *(one for part in adapter.values() for one in part.tensors)]:
        assert not tensor.requires_grad
        assert tensor.grad is None
    torch.testing.assert_close(forward_without_cache(model, inputs, LAYOUT, adapter), before)


@pytest.mark.parametrize(("graph", "runs"), [(1, 3 * 2), (7 * 24 * 3 * HIDDEN * 4, 3 + 1), (1 << 29, 1)])
def test_how_much_is_remembered_does_not_change_the_result(llama, graph, runs, monkeypatch):
    """Sequences one by one and all blocks computed again; only the sequence of nine; everything at once."""
    _, model = llama
    inputs, ends, adapter = drawn(model, 1), drawn(model, 2), make_adapter(model)
    expected = all_of(compute_gradients(model, inputs, ends, LAYOUT, adapter))
    monkeypatch.setattr(gradients, "MAX_GRAPH_BYTES", graph)
    count = []
    handle = model.adapted._layers[2].self_attn.register_forward_hook(lambda *args: count.append(1))
    assert_equal(all_of(compute_gradients(model, inputs, ends, LAYOUT, adapter)), expected, 1e-5)
    handle.remove()
    assert len(count) == runs
    assert not any("forward" in vars(layer) for layer in model.layers)


ONE = Span(1, 2)
"""A single block: what is rounded in the first one changes a lot behind the third."""

ROWS = StepLayout((0, 0), (5, 9))


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantized_blocks(quant, tmp_path_factory):
    """As of a model whose weights are what the quantized ones stand for; products round to 16 bits."""
    folder, model = make("opt_projected", tmp_path_factory, quant=quant)
    local, part = Local(folder), model.narrowed(ONE)
    for name, module in local.layers[1].named_modules():
        dense = getattr(part.layers[0].get_submodule(name), "dense", None)
        if dense is not None:
            module.weight.data = dense()
    inputs, ends, adapter = drawn(model, 1, ROWS), drawn(model, 2, ROWS), make_adapter(part)
    _, expected = local.gradients(inputs, ends, ROWS, adapter, ONE)
    assert_equal(all_of(compute_gradients(part, inputs, ends, ROWS, adapter)), expected, 0.03)
