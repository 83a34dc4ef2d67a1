"""Weights in 8 and 4 bits on a GPU without bitsandbytes: their numbers, and which kernel multiplies them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from benchmarks.gpu.stand_in.card import CARD, card
from swarm.common.trials import Timing
from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.loading.span_loading import load_span
from swarm.models.weights import gpu_linears
from swarm.models.weights.frozen_linear import FrozenLinear
from swarm.models.weights.gpu_linears import GPU_LINEARS, Kernel, KernelChoice, choose_kernel
from swarm.models.weights.quantization import INT4, INT8, quantize, tried_products
from swarm.models.weights.weight_only import Int4Linear, Int8Linear

CPU = torch.device("cpu")
ROUNDING = 6e-3


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    choose_kernel.cache_clear()
    yield
    choose_kernel.cache_clear()


def linear(out: int = 96, into: int = 320, bias: bool = False) -> nn.Linear:
    made = nn.Linear(into, out, bias=bias, dtype=torch.float32)
    with torch.no_grad():
        made.weight.copy_(torch.randn(out, into, generator=torch.Generator().manual_seed(0)) / into**0.5)
    return made.to(torch.bfloat16).requires_grad_(False)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def right(layer: FrozenLinear):
    """A kernel that is right for this layer, whatever it is packed in."""
    return lambda tokens, values, scales: (tokens.float() @ layer.dense().float().T).to(tokens.dtype)


def use_kernels(monkeypatch, *kernels: Kernel) -> None:
    monkeypatch.setattr(gpu_linears, "candidate_kernels", lambda form: kernels)


def use_times(monkeypatch, limit: int, seconds: float = 1.0) -> None:
    """Kernels are faster for so many tokens."""

    def compare(layer, tokens) -> Timing:
        return Timing(seconds if len(tokens) <= limit else 3.0, 2.0)

    monkeypatch.setattr(gpu_linears, "_compare", compare)


def by_unpacking(tokens: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A right kernel for int8, slow."""
    return (tokens.float() @ (values.float() * scales.float().unsqueeze(1)).T).to(tokens.dtype)


@pytest.mark.parametrize(("form", "on_cpu"), [(INT8, Int8Linear), (INT4, Int4Linear)])
def test_the_numbers_are_those_of_a_cpu(form, on_cpu):
    """So that both are announced by the same name."""
    here, there = on_cpu(linear()), GPU_LINEARS[form](linear())
    if form == INT8:
        assert torch.equal(here.dense(), there.dense())
        assert torch.equal(here.values, there.values)
    else:  # one of them rounds a weight twice
        torch.testing.assert_close(here.dense(), there.dense(), rtol=2**-7, atol=1e-3)
    inputs = torch.randn(5, 320, dtype=torch.bfloat16)
    assert error(there(inputs), here(inputs)) <= ROUNDING


def test_parts_of_a_weight_are_unpacked_one_by_one(monkeypatch):
    for kind in GPU_LINEARS.values():
        layer = kind(linear(out=208))
        whole, inputs = layer.dense(), torch.randn(3, 320, dtype=torch.bfloat16)
        expected = layer(inputs)
        monkeypatch.setattr(kind, "PART_WEIGHTS", 64 * 320)
        assert len([*layer._part_bounds()]) == 4
        assert torch.equal(layer.dense(), whole)
        assert torch.equal(kind(linear(out=208)).values, layer.values)
        assert error(layer(inputs), expected) <= ROUNDING


def test_torchs_own_kernel_is_right():
    layer = GPU_LINEARS[INT8](linear())
    assert gpu_linears._try_kernel.__doc__
    layer.use(KernelChoice(Kernel("torch", gpu_linears._by_torch), 16))
    inputs = torch.randn(16, 320, dtype=torch.bfloat16)
    assert error(layer._multiply_packed(inputs), layer._multiply_by_parts(inputs)) <= ROUNDING


def test_a_kernel_is_used_for_as_many_tokens_as_it_is_faster_for(monkeypatch):
    use_kernels(monkeypatch, Kernel("right", by_unpacking))
    use_times(monkeypatch, limit=16)
    choice = choose_kernel(INT8, 96, 320, CPU)
    assert (choice.kernel, choice.max_tokens) == (Kernel("right", by_unpacking), 16)
    assert [str(one) for one in choice.trials] == [
        "int8, 96 x 320 by right: used, right, and for up to 16 tokens faster than unpacking: "
        "1000.00 ms a step instead of 2000.00"
    ]


@pytest.mark.parametrize(
    ("kernel", "limit", "reason"),
    [
        (lambda *given: by_unpacking(*given) * 2.0, 64, "its results are wrong for 1 tokens: relative error 1.0e+00"),
        (lambda *given: by_unpacking(*given) * torch.nan, 64, "its results are wrong for 1 tokens: relative error nan"),
        (lambda *given: by_unpacking(*given)[:, :3], 64, "it fails: The size of tensor a"),
        (lambda *given: 1 / 0, 64, "it fails: division by zero"),
        (by_unpacking, 0, "right, but not faster than unpacking: 3000.00 ms a step instead of 2000.00"),
    ],
)
def test_a_kernel_that_is_wrong_fails_or_is_slow_is_not_used(monkeypatch, kernel, limit, reason):
    use_kernels(monkeypatch, Kernel("bad", kernel))
    use_times(monkeypatch, limit)
    layer = gpu_linears.gpu_linear(linear(bias=True), INT8, CPU)
    tried, fallback = layer.trials
    assert str(tried).startswith(f"int8, 96 x 320 by bad: not used, {reason}")
    assert str(fallback) == "int8, 96 x 320 by unpacking: used, no kernel is right and faster"
    inputs = torch.randn(2, 320, dtype=torch.bfloat16)
    assert error(layer(inputs), layer._multiply_by_parts(inputs) + layer.bias) <= ROUNDING


def test_a_kernel_that_is_wrong_for_many_tokens_alone_is_not_used(monkeypatch):
    def wrong(tokens, values, scales):
        return by_unpacking(tokens, values, scales) * (1 if len(tokens) < 64 else 2)

    use_kernels(monkeypatch, Kernel("bad", wrong))
    use_times(monkeypatch, 64)
    assert choose_kernel(INT8, 96, 320, CPU).kernel is None


def test_the_fastest_of_several_is_used(monkeypatch):
    use_kernels(monkeypatch, Kernel("slow", by_unpacking), Kernel("fast", lambda *given: by_unpacking(*given)))

    def compare(layer, tokens) -> Timing:
        return Timing(1.0 if layer._kernel.name == "fast" else 1.5, 2.0)

    monkeypatch.setattr(gpu_linears, "_compare", compare)
    choice = choose_kernel(INT8, 96, 320, CPU)
    assert choice.kernel.name == "fast"
    assert str(choice.trials[0]) == "int8, 96 x 320 by slow: not used, fast is faster"


def test_times_are_really_measured(monkeypatch):
    """A kernel that waits is slower than unpacking, and one that returns at once is faster."""
    ready = torch.empty(64, 96, dtype=torch.bfloat16)

    def at_once(tokens, values, scales):
        return ready[: len(tokens)]

    def waits(tokens, values, scales):
        time.sleep(0.02)
        return ready[: len(tokens)]

    layer = GPU_LINEARS[INT8](linear())
    for kernel, faster in ((at_once, True), (waits, False)):
        layer.use(KernelChoice(Kernel("one", kernel)))
        assert bool(gpu_linears._compare(layer, torch.randn(8, 320, dtype=torch.bfloat16))) is faster


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_span_on_a_card_says_how_its_weights_are_multiplied():
    """The stand-in has no bitsandbytes and cannot run Triton: int8 has torch's kernel or none, int4 is unpacked."""
    plain = load_span(open_checkpoint(), Span(2, 4), dtype=torch.bfloat16, device=CPU)
    hidden = torch.randn(1, 20, plain.hidden_size).bfloat16()
    added = plain.forward(hidden) - hidden
    with card():
        for form in (INT8, INT4):
            model = load_span(open_checkpoint(), Span(2, 4), dtype=torch.bfloat16, device=CARD, quant=form)
            layers = [one for one in model.module.modules() if isinstance(one, FrozenLinear)]
            assert {type(one) for one in layers} == {GPU_LINEARS[form]}
            assert model.digests == plain.digests
            found = (model.forward(hidden.to(CARD)) - hidden.to(CARD)).cpu()
            assert 0 < error(found, added) <= (0.03 if form == INT8 else 0.3)
            said = [str(trial) for trial in choose_forward(model).strategy.trials]
            assert any(
                one.startswith(f"{form}, ") and "by Triton in steps of 128: not used, it fails" in one for one in said
            ), said
            assert any(one.startswith(f"{form}, ") and ": used, " in one for one in said), said
        products = [str(trial) for trial in tried_products(256, 256, CARD)]
        assert any(one.startswith("int8, 256 x 256 by ") for one in products)
        assert any(one.startswith("int4, 256 x 256 by unpacking: used") for one in products)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_are_packed_where_they_are_used():
    with card():
        layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(24, 24)])
        quantize(layers, INT4, CARD)
        assert [type(one) for one in layers] == [GPU_LINEARS[INT4], nn.Linear]
        assert layers[0].values.device == layers[0].scales.device == layers[0].bias.device == CARD
