"""Weights in 8 and 4 bits: spans in the forms that the product has here, and kernels beside bf16."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.gpu import schedules, spans, tiny
from benchmarks.gpu.bench import Bench, Case, NotHere, Step, WrongResult, seconds_of
from benchmarks.gpu.records import Measured
from swarm.errors import InvalidOption
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.weights.gpu_linears import GPU_LINEARS
from swarm.models.weights.quantization import INT4, INT8, NF4, form_for_device

MAX_ERROR = {INT8: 0.2, NF4: 0.8}
"""Median error of a token of the zoo's tiny models, whose weights are spread far wider than real ones."""

KERNEL_ERROR = {INT8: 0.02, INT4: 0.15, "float8": 0.06}
"""Of a product of normal numbers, relative to its norm."""

GROUP = 64
TOKENS = (1, 8, 64)

Product = Callable[[torch.Tensor], torch.Tensor]
"""Inputs `[tokens, in]` in bf16 to outputs `[tokens, out]`."""


def _cases(bench: Bench) -> list[Case]:
    forms = [Case(f"a span in {form}", partial(_span, form=form), 4.0) for form in (INT8, NF4)]
    kernels = [
        Case(f"{way} {form}, {tokens} tokens", partial(_kernel, way=way, form=form, tokens=tokens), 1.0)
        for (way, form), tokens in itertools.product(KERNELS, bench.sized(TOKENS, (1, 8)))
    ]
    return forms + kernels


STEP = Step("quantization", "Weights in 8 and 4 bits", 25.0, _cases)


def _span(bench: Bench, form: str) -> Measured:
    checkpoint = tiny.checkpoint_of("llama", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    schedule = schedules.random_schedule(2, (1, 5, 9))
    _, expected = schedules.play(tiny.load(checkpoint, torch.float32, tiny.CPU), schedule)
    held = form_for_device(bench.device, form)
    try:
        model = tiny.load(checkpoint, torch.bfloat16, bench.device, quant=held)
    except (ImportError, InvalidOption) as error:
        raise NotHere(str(error)) from error
    found = schedules.errors(schedule, *schedules.play(model, schedule), expected)
    for name, allowed in (("median", MAX_ERROR[form]), ("of_a_round", 2 * MAX_ERROR[form])):
        if not getattr(found, name) <= allowed:
            raise WrongResult(f"relative error {getattr(found, name):.2e} ({name}), and {allowed:.0e} is allowed")
    values: dict[str, float | int | str] = {"error": found.median, "largest of a round": found.of_a_round}
    return Measured(values, note=f"{held}, {spans.why(choose_forward(model))}")


def _kernel(bench: Bench, way: str, form: str, tokens: int) -> Measured:
    """A product with a packed weight, beside the same in bf16."""
    if way == "Triton's" and not bench.real:
        raise NotHere("Triton needs a card")
    size_in, size_out = bench.sized((4096, 11008), (256, 256))
    weight = torch.randn(size_out, size_in, device=bench.device).to(torch.bfloat16) / size_in**0.5
    inputs = torch.randn(tokens, size_in, device=bench.device).to(torch.bfloat16)
    try:
        product = KERNELS[way, form](weight)
        result = product(inputs).float()
    except (RuntimeError, AttributeError, ImportError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        raise NotHere(f"this torch has none for this device: {str(error).splitlines()[0]}") from error
    expected = inputs.float() @ weight.float().T
    error = float((result - expected).norm() / expected.norm())
    if not error <= KERNEL_ERROR[form]:
        raise WrongResult(f"relative error {error:.2e}, and {KERNEL_ERROR[form]:.0e} is allowed")
    packed = seconds_of(bench.device, lambda: product(inputs), 10)
    plain = seconds_of(bench.device, lambda: inputs @ weight.T, 10)
    return Measured({"error": error, "us": packed * 1e6, "us in bf16": plain * 1e6, "times bf16": plain / packed})


def _ours(weight: torch.Tensor, form: str, unpacked: bool) -> Product:
    """The product's own, by its kernel in Triton or by unpacking."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    layer = GPU_LINEARS[form](linear)
    if unpacked:
        return layer.product
    from swarm.models.weights.triton_products import multiply

    return lambda inputs: multiply(inputs, layer.values, layer.scales)


def _int8(weight: torch.Tensor) -> Product:
    scales = (weight.float().abs().amax(1) / 127).to(torch.bfloat16)
    values = (weight.float() / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return lambda inputs: torch.ops.aten._weight_int8pack_mm(inputs, values, scales)


def _int4(weight: torch.Tensor) -> Product:
    """As torch's tinygemm kernel wants it: `(level - 8) * scale + offset`, two levels a byte, the first one high."""
    groups = weight.float().view(len(weight), -1, GROUP)
    least, greatest = groups.amin(2), groups.amax(2)
    scales = ((greatest - least) / 15).clamp(min=1e-9)
    offsets = least + 8 * scales
    levels = ((groups - offsets.unsqueeze(2)) / scales.unsqueeze(2)).round().add(8).clamp(0, 15).flatten(1).int()
    both = torch.stack([scales, offsets], 2).transpose(0, 1).contiguous().to(torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack((levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8), 8)
    return lambda inputs: torch.ops.aten._weight_int4pack_mm(inputs, packed, GROUP, both)


def _float8(weight: torch.Tensor) -> Product:
    """Inputs are rounded to 8 bits too, each token by a scale of its own."""
    values, scales = _to_float8(weight)

    def product(inputs: torch.Tensor) -> torch.Tensor:
        rounded, of_tokens = _to_float8(inputs)
        return torch._scaled_mm(
            rounded, values.T, scale_a=of_tokens, scale_b=scales.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product


def _to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = (rows.float().abs().amax(1, keepdim=True) / limit).clamp(min=1e-12)
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


KERNELS: dict[tuple[str, str], Callable[[torch.Tensor], Product]] = {
    **{("Triton's", form): partial(_ours, form=form, unpacked=False) for form in GPU_LINEARS},
    **{("unpacked", form): partial(_ours, form=form, unpacked=True) for form in GPU_LINEARS},
    ("torch's", INT8): _int8,
    ("torch's", INT4): _int4,
    ("torch's", "float8"): _float8,
}
"""Products by who computes them and by form."""
