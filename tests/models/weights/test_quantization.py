"""Quantized linear layers against what they stand for; spans, footprints and gradients with them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional

from swarm.data_structures import Span, StepLayout
from swarm.errors import InvalidOption
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.execution.session_cache import SessionCache
from swarm.models.loading.span_loading import load_span
from swarm.models.weights import quantization
from swarm.models.weights.frozen_linear import FrozenLinear
from swarm.models.weights.quantization import (
    INT4,
    INT8,
    NF4,
    NONE,
    Nf4Linear,
    form_for_device,
    quantizable,
    quantize,
    quantized_bytes,
    require_available,
    weight_bytes,
)
from swarm.models.weights.weight_only import INT4_GROUP_SIZE, Int4Linear, Int8Linear, TwoDigitInt8Linear
from tests import zoo

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
KINDS = {
    "int8": Int8Linear,
    "int4": Int4Linear,
    "int8 of a GPU": TwoDigitInt8Linear,
    "NF4": lambda linear: Nf4Linear(linear, CPU),
}
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
OURS = ["int8", "int4", "int8 of a GPU"]
ALL_KINDS = [*OURS, pytest.param("NF4", marks=NEEDS_BITSANDBYTES)]
ERROR = {kind: 0.012 if "int8" in kind else 0.11 for kind in KINDS}
"""Of products of normal weights, relative to their norm."""

ROUNDING = 6e-3
"""Of inputs and products to bfloat16."""


@pytest.fixture(autouse=True)
def quiet_bitsandbytes():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="bitsandbytes")
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        yield


def make(out: int, into: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    generator = torch.Generator().manual_seed(out + into)
    linear = nn.Linear(into, out, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(out, into, generator=generator) / into**0.5)
    return linear.to(dtype).requires_grad_(False)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_products(kind, dtype):
    """Near the plain layer's, and, but for rounding, just those of the weight that it says it holds."""
    plain = make(208, 7 * INT4_GROUP_SIZE, True, dtype)
    layer = KINDS[kind](plain)
    dense = layer.dense()
    assert dense.dtype == dtype
    assert 0 < error(dense, plain.weight) <= ERROR[kind]
    for shape in ((1,), (3,), (12,), (13,), (2, 32), (65,), (2, 1, 40), ()):
        inputs = torch.randn(*shape, 7 * INT4_GROUP_SIZE).to(dtype)
        before = inputs.clone()
        result = layer(inputs)
        assert result.shape == (*shape, 208)
        assert result.dtype == dtype
        assert error(result, functional.linear(inputs.float(), dense.float(), plain.bias.float())) <= ROUNDING
        assert torch.equal(inputs, before)
    assert layer(torch.empty(0, 7 * INT4_GROUP_SIZE, dtype=dtype)).shape == (0, 208)


def test_an_input_that_stands_out_costs_the_others_nothing():
    """As inputs of large models do, a thousand times: the others keep what bfloat16 says of them, on a GPU too."""
    plain = make(64, 4 * INT4_GROUP_SIZE, bias=False)
    layer = TwoDigitInt8Linear(plain)
    inputs = torch.randn(40, 4 * INT4_GROUP_SIZE)
    inputs[:, 3] = 300.0
    inputs[7] = 0.0
    dense = layer.dense()
    dense[:, 3] = layer.values[:, 3] = 0
    assert error(layer(inputs), functional.linear(inputs, dense)) <= ROUNDING
    inputs[0, 5] = float("nan")
    result = layer(inputs)
    assert result[0].isnan().all()
    assert result[1:].isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_both_ways_of_multiplying_agree(kind, monkeypatch):
    """The kernel on packed weights, and unpacking by parts, also where the last part is a small one."""
    for out, groups in ((16, 1), (48, 2), (64, 1), (176, 3), (80, 5)):
        into = groups * INT4_GROUP_SIZE
        layer = KINDS[kind](make(out, into, bias=False, dtype=torch.bfloat16))
        inputs = torch.randn(9, into, dtype=torch.bfloat16)
        monkeypatch.setattr(type(layer), "PART_WEIGHTS", 64 * into)
        results = []
        for limit in (0, 100):
            monkeypatch.setattr(type(layer), "max_kernel_tokens", limit)
            results.append(layer(inputs))
        assert error(results[0], results[1]) <= ROUNDING


@pytest.mark.parametrize("kind", OURS)
def test_weights_on_the_grid_are_kept_exactly(kind):
    levels = 127 if "int8" in kind else 7
    weight = torch.randint(
        -levels, levels + 1, (64, 2 * INT4_GROUP_SIZE), generator=torch.Generator().manual_seed(0)
    ).float()
    weight[:, ::INT4_GROUP_SIZE], weight[:, 1::INT4_GROUP_SIZE] = levels, -levels - ("int4" in kind)
    linear = make(64, 2 * INT4_GROUP_SIZE)
    linear.weight.data = weight / 64
    assert torch.equal(KINDS[kind](linear).dense(), weight / 64)


@pytest.mark.parametrize("kind", OURS)
def test_rows_of_zeros_and_of_equal_weights(kind):
    linear = make(64, INT4_GROUP_SIZE)
    linear.weight.data[0], linear.weight.data[1] = 0.0, 0.25
    dense = KINDS[kind](linear).dense()
    assert dense.isfinite().all()
    assert torch.equal(dense[0], torch.zeros(INT4_GROUP_SIZE))
    assert error(dense[1], linear.weight[1]) <= 0.01


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_gradients_of_the_inputs(kind):
    dtype = torch.bfloat16
    layer = KINDS[kind](make(96, 2 * INT4_GROUP_SIZE, True, dtype))
    plain = make(96, 2 * INT4_GROUP_SIZE, True, dtype)
    plain.weight.data = layer.dense()
    values, upstream = torch.randn(5, 2 * INT4_GROUP_SIZE).to(dtype), torch.randn(5, 96).to(dtype)
    gradients = []
    for module in (plain, layer):
        inputs = values.clone().requires_grad_()
        module(inputs).backward(upstream)
        gradients.append(inputs.grad)
    assert error(gradients[1], gradients[0]) <= ROUNDING


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_processors_with_other_instructions(capability):
    """torch packs 4-bit weights differently there; whatever it does, the weights come back."""
    code = f"""
import torch
from torch import nn
from swarm.models.weights.weight_only import INT4_GROUP_SIZE as GROUP, Int4Linear, Int8Linear
for kind in (Int8Linear, Int4Linear):
    layer = kind(nn.Linear(GROUP, 176, bias=False, dtype=torch.bfloat16))
    eye = torch.eye(GROUP, dtype=torch.bfloat16)
    few, many = layer._multiply_packed(eye), layer._multiply_by_parts(eye)
    assert (few - layer.dense().T).norm() <= {ROUNDING} * few.norm(), kind
    assert (few - many).norm() <= {ROUNDING} * few.norm(), kind
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_an_unknown_packing_is_refused(monkeypatch):
    monkeypatch.setattr(quantization, "int4_layout", lambda: None)
    with pytest.raises(InvalidOption, match="use int8 or none"):
        require_available(INT4, CPU)
    require_available(INT8, CPU)


def test_what_a_machine_cannot_compute_is_refused(monkeypatch):
    with pytest.raises(InvalidOption, match="not on mps"):
        require_available(INT8, torch.device("mps"))
    require_available(NONE, torch.device("mps"))
    for form, device in ((NF4, CPU), (INT4, torch.device("cuda"))):
        monkeypatch.setattr(quantization, "find_spec", lambda name: name)
        with pytest.raises(InvalidOption, match="4 bits are nf4 on a GPU"):
            require_available(form, device)
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match="pip install bitsandbytes"):
        require_available(NF4, torch.device("cuda"))
    require_available(INT8, torch.device("cuda"))
    require_available(INT8, CPU)


def test_nf4_is_called_what_it_is():
    assert form_for_device(CPU, NF4) == INT4
    assert form_for_device(torch.device("cuda"), NF4) == NF4
    assert form_for_device(CPU, INT8) == INT8


@pytest.mark.parametrize("form", [INT8, INT4, pytest.param(NF4, marks=NEEDS_BITSANDBYTES)])
def test_bytes(form):
    """What is counted beforehand is not less than what is there, and little more."""
    kind = {INT8: Int8Linear, INT4: Int4Linear, NF4: KINDS["NF4"]}[form]
    for out, into in ((192, 448), (64, 64), (1024, 256)):
        held = weight_bytes(kind(make(out, into, bias=False)))
        assert held <= quantized_bytes(out, into, form) <= held * 1.05 + 2048


def test_layers_that_cannot_be_quantized():
    class Special(nn.Linear):
        pass

    assert quantizable(nn.Linear(64, 16), INT4)
    assert not quantizable(nn.Linear(64, 24), INT4)
    assert not quantizable(nn.Linear(96, 16), INT4)
    assert quantizable(nn.Linear(48, 8), INT8)
    assert not quantizable(nn.Linear(48, 7), INT8)
    assert not quantizable(nn.Linear(24, 8), INT8)
    assert not quantizable(Special(64, 64), INT8)
    layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(24, 24), nn.LayerNorm(64)])
    quantize(layers, INT8, CPU)
    assert [type(layer) for layer in layers] == [Int8Linear, nn.Linear, nn.LayerNorm]


ALL = Span(0, zoo.BLOCKS)


def load(folder, form: str, span: Span = ALL, dtype: torch.dtype = torch.float32):
    return load_span(open_checkpoint(folder), span, dtype=dtype, device=CPU, quant=form)


@pytest.mark.parametrize(("form", "dtype"), [(INT8, torch.float32), (INT4, torch.bfloat16)])
def test_a_quantized_span(form, dtype):
    """The demo model's: what it announces, counts and computes."""
    checkpoint, span = open_checkpoint(), Span(2, 6)
    plain, model = load(None, NONE, span, dtype), load(None, form, span, dtype)
    assert model.digests == plain.digests
    assert (model.dtype, model.positions, model.strategy.packed) == (dtype, plain.positions, plain.strategy.packed)
    assert sum(isinstance(module, FrozenLinear) for module in model.module.modules()) == span.length * 7
    counted = memory_footprint(checkpoint, dtype, form)
    assert model.weight_bytes <= sum(counted.block_bytes[2:6]) <= 1.02 * model.weight_bytes
    assert counted.cache_bytes_per_token == memory_footprint(checkpoint, dtype).cache_bytes_per_token
    hidden = torch.randn(2, 20, model.hidden_size).to(dtype)
    added = plain.forward(hidden) - hidden
    assert 0 < error(model.forward(hidden) - hidden, added) <= (0.03 if form == INT8 else 0.3)


def test_a_footprint_without_quantization_is_what_is_loaded():
    checkpoint = open_checkpoint()
    assert (
        sum(memory_footprint(checkpoint, torch.bfloat16).block_bytes[:2])
        == load(None, NONE, Span(0, 2), torch.bfloat16).weight_bytes
    )


@pytest.mark.parametrize("family", zoo.REPRESENTATIVES)
def test_every_family(family, tmp_path):
    """Loaded block by block, quantized where the shapes allow: each step computes what the whole sequence does."""
    folder = zoo.make_checkpoint(family, tmp_path)
    model, plain = load(folder, INT8), load(folder, NONE)
    assert model.digests == plain.digests
    assert (model.dtype, model.positions) == (plain.dtype, plain.positions)
    # Inputs are rounded to bfloat16, which these models spread widely: it is the same model, not the same numbers.
    hidden = torch.randn(9, model.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = SessionCache(model).step(hidden, StepLayout((0,), (9,)))
    assert error(expected, SessionCache(plain).step(hidden, StepLayout((0,), (9,)))) <= 0.5
    cache = SessionCache(model)
    parts = [cache.step(hidden[:6], StepLayout((0,), (6,)))]
    parts += [cache.step(hidden[n : n + 1], StepLayout((n,), (1,))) for n in range(6, 9)]
    assert error(torch.cat(parts), expected) <= 0.2


def test_parts_of_a_quantized_span(tmp_path):
    model = load(zoo.make_checkpoint("gemma3_text", tmp_path), INT8)
    hidden = torch.randn(1, 5, model.hidden_size)
    expected = model.forward(hidden)
    for span in (Span(0, 2), Span(2, 3), Span(3, 6)):
        hidden = model.narrowed(span).forward(hidden)
    assert torch.equal(hidden, expected)
