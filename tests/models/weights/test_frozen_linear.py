"""Frozen linear layers against plain ones: results, gradients, memory, and every family that reads a weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.loading.span_loading import load_span
from swarm.models.weights import frozen_linear
from swarm.models.weights.frozen_linear import ChunkedLinear, FrozenLinear, PrepackedLinear, can_prepack, prepack
from tests import zoo
from tests.models import test_zoo_spans

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Error beside the largest result. Sums are taken in another order."""

needs_fp32 = pytest.mark.skipif(not can_prepack(torch.float32), reason="torch has no oneDNN here")


def forms() -> list:
    """Every way to hold a weight, as far as this processor can compute with it."""
    skip = pytest.mark.skipif
    prepacked = [
        pytest.param(PrepackedLinear, dtype, marks=skip(not can_prepack(dtype), reason="not on this processor"))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [*prepacked, *((ChunkedLinear, dtype) for dtype in TOLERANCE)]


def make(out: int, into: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(out + into)
    return nn.Linear(into, out, bias=bias, dtype=dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if expected.numel():
        assert (result - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(("form", "dtype"), forms())
def test_equals_a_plain_layer(form, dtype):
    for out, into, bias in ((96, 64, True), (33, 17, False), (1, 40, True), (256, 512, False), (600, 48, True)):
        plain = make(out, into, bias, dtype)
        packed = form(plain)
        assert torch.equal(packed.weight, plain.weight)
        assert packed.weight.layout is torch.strided
        for rows in (0, 1, 2, 3, 4, 7, 8, 33, 128, 1024):
            inputs = torch.randn(rows, into, dtype=dtype)
            before = inputs.clone()
            assert_close(packed(inputs), plain(inputs).detach(), dtype)
            assert torch.equal(inputs, before)


@pytest.mark.parametrize(("form", "dtype"), forms())
def test_gradients_of_the_inputs(form, dtype):
    plain = make(600, 40, True, dtype).requires_grad_(False)
    packed, shape = form(plain), (2, 3)
    values, upstream = torch.randn(*shape, 40, dtype=dtype), torch.randn(*shape, 600, dtype=dtype)
    gradients = []
    for module in (plain, packed):
        inputs = values.clone().requires_grad_()
        functional.silu(module(inputs)).backward(upstream)
        gradients.append(inputs.grad)
    assert_close(gradients[1], gradients[0], dtype)


@needs_fp32
@pytest.mark.parametrize("inputs", [torch.randn(2, 39), torch.randn(2, 40, dtype=torch.float64)])
def test_inputs_that_do_not_fit_are_refused(inputs):
    for form in (PrepackedLinear, ChunkedLinear):
        with pytest.raises(RuntimeError):
            form(make(24, 40, True, torch.float32))(inputs)


@pytest.fixture
def pack_all(monkeypatch):
    monkeypatch.setattr(frozen_linear, "MIN_FP32_WEIGHTS", 0)


@needs_fp32
@pytest.mark.parametrize(("instructions", "form"), [("AVX512", PrepackedLinear), ("AVX2", ChunkedLinear)])
def test_which_layers_are_replaced(instructions, form, pack_all, monkeypatch):
    monkeypatch.setattr(frozen_linear, "_instructions", lambda: instructions)

    class Special(nn.Linear):
        pass

    shared = nn.Linear(8, 8)  # in two places
    layers = nn.ModuleDict(
        {"plain": nn.Linear(8, 8), "special": Special(8, 8), "wide": nn.Linear(8, 8, dtype=torch.float64)}
    )
    layers["one"], layers["other"] = nn.Sequential(shared), nn.Sequential(shared)
    prepack(layers)
    assert type(layers["plain"]) is form
    assert type(layers["special"]) is Special
    assert type(layers["wide"]) is nn.Linear
    assert type(layers["one"][0]) is form
    assert layers["one"][0] is layers["other"][0]


@needs_fp32
@pytest.mark.parametrize("instructions", ["AVX512", "AVX2"])
@pytest.mark.parametrize("family", zoo.REPRESENTATIVES)
def test_every_family_computes_the_same(family, instructions, tmp_path, monkeypatch, pack_all):
    """Also those that subclass linear layers, fuse experts, or read weights themselves."""
    monkeypatch.setattr(frozen_linear, "_instructions", lambda: instructions)
    folder = zoo.make_checkpoint(family, tmp_path)
    packed = test_zoo_spans.load(folder, Span(0, zoo.BLOCKS))
    monkeypatch.setattr(frozen_linear, "MIN_FP32_WEIGHTS", float("inf"))
    plain = test_zoo_spans.load(folder, Span(0, zoo.BLOCKS))
    assert packed.weight_bytes == plain.weight_bytes
    assert packed.digests == plain.digests
    assert (packed.dtype, packed.device, packed.positions) == (plain.dtype, plain.device, plain.positions)
    assert packed.strategy.packed == plain.strategy.packed
    hidden = torch.randn(2, 7, packed.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = plain.forward(hidden)
    assert (packed.forward(hidden) - expected).norm() <= 1e-4 * expected.norm()


@needs_fp32
def test_spans_are_prepacked_unless_their_weights_are_small(tmp_path, pack_all):
    model = load_span(open_checkpoint(), Span(0, 2), dtype=torch.float32, device=CPU)
    assert sum(isinstance(module, FrozenLinear) for module in model.module.modules()) == 2 * 7
    assert not any(type(module) is nn.Linear for module in model.module.modules())
