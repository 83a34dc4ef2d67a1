"""Weights in 8 and 4 bits on a GPU without bitsandbytes: the forms of a CPU, multiplied by kernels tried before use.

int8 has the same numbers as on a CPU, and int4 the same 16 evenly spaced values for each group. Few tokens are
multiplied by a kernel that reads the packed weight: one of our own in Triton, or torch's. For many tokens, and where no
kernel is right and faster, the weight is unpacked and multiplied in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from swarm.common.trials import NotBetter, Timing, Trial, attempt, is_faster
from swarm.models.weights.weight_only import INT4_GROUP_SIZE, Int8Linear, WeightOnlyLinear, int4_grid

UNPACKED_PART_WEIGHTS_ON_GPU = 1 << 25
"""Weights that are unpacked at once on a GPU: 64 MiB in bfloat16."""

TRIED_TOKENS = (1, 8, 16, 64)
"""Batches that kernels are tried for, from small to large."""

MAX_KERNEL_ERROR = 1e-2
"""Of a kernel's products, relative to their norm: bfloat16 rounds inputs, weights and sums."""

TIMED_ROUNDS = 5


class Kernel(NamedTuple):
    """A product with a packed weight.

    Attributes:
        name: for people.
        multiply: tokens `[tokens, in]` bfloat16, packed values and their scales, to `[tokens, out]` bfloat16. Reads
            nothing from the GPU, so that it can be recorded.
    """

    name: str
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class KernelChoice(NamedTuple):
    """The kernel for weights of one shape, the most tokens that it is used for, and what was tried."""

    kernel: Kernel | None = None
    max_tokens: int = 0
    trials: tuple[Trial, ...] = ()


class _TriedLinear(WeightOnlyLinear):
    """Weights that a tried kernel multiplies; without one they are always unpacked."""

    PART_WEIGHTS = UNPACKED_PART_WEIGHTS_ON_GPU
    max_kernel_tokens = 0
    values: nn.Parameter
    scales: nn.Parameter

    _kernel: Kernel | None = None

    def use(self, choice: KernelChoice) -> None:
        """Multiply few tokens by this kernel."""
        self._kernel, self.max_kernel_tokens, self.trials = choice

    def _multiply_packed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._kernel is not None
        return self._kernel.multiply(tokens, self.values, self.scales)


class GpuInt8Linear(_TriedLinear, Int8Linear):
    """8 bits a weight, with the numbers of `Int8Linear`."""


class GpuInt4Linear(_TriedLinear):
    """4 bits a weight, with the numbers of `Int4Linear`: two neighbors a byte, the first one in its lower half.

    Attributes:
        values: `[out, in / 2]` uint8.
        scales: `[2, out, groups]` bfloat16, scales and then offsets.
    """

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        device, groups = linear.weight.device, self.in_features // INT4_GROUP_SIZE
        values = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device=device)
        scales_2OG = torch.empty(2, self.out_features, groups, dtype=torch.bfloat16, device=device)
        for start, end in self._part_bounds():
            levels, scales_2OG[0, start:end], scales_2OG[1, start:end] = int4_grid(linear.weight[start:end])
            packed = levels.to(torch.uint8)
            values[start:end] = packed[:, ::2] | packed[:, 1::2] << 4
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales_2OG, requires_grad=False)

    def _unpack_part(self, start: int, end: int) -> torch.Tensor:
        packed = self.values[start:end]
        levels = torch.stack([packed & 15, packed >> 4], 2).to(torch.bfloat16).sub_(8)
        scales_OG1, offsets_OG1 = self.scales[:, start:end].unsqueeze(3)
        return torch.addcmul(offsets_OG1, levels.view(end - start, -1, INT4_GROUP_SIZE), scales_OG1).flatten(1)

    def _multiply_part(self, tokens: torch.Tensor, start: int, end: int, result: torch.Tensor) -> None:
        result.copy_(functional.linear(tokens, self._unpack_part(start, end)))


GPU_LINEARS: dict[str, type[GpuInt8Linear] | type[GpuInt4Linear]] = {"int8": GpuInt8Linear, "int4": GpuInt4Linear}
"""The layer for each form."""


def gpu_linear(linear: nn.Linear, form: str, device: torch.device) -> WeightOnlyLinear:
    """The layer in `form` on a device, with the kernel that is best there for its shape."""
    layer = GPU_LINEARS[form](linear.to(device))
    layer.use(choose_kernel(form, layer.out_features, layer.in_features, device))
    return layer


def candidate_kernels(form: str) -> tuple[Kernel, ...]:
    """Kernels that a device may have for a form."""
    in_triton = tuple(Kernel(f"Triton in steps of {step}", partial(_by_triton, step=step)) for step in (128, 256))
    return (*in_triton, Kernel("torch", _by_torch)) if form == "int8" else in_triton


def _by_triton(tokens: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor:
    from swarm.models.weights.triton_products import multiply  # late: it takes a second, and not every torch has Triton

    return multiply(tokens, values, scales, step)


def _by_torch(tokens: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.aten._weight_int8pack_mm.default(tokens, values, scales))


@cache
def choose_kernel(form: str, out_features: int, in_features: int, device: torch.device) -> KernelChoice:
    """The fastest kernel of those that are right for weights of a shape, tried with random ones on the device."""
    plain = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16, device=device)
    layer, shape = GPU_LINEARS[form](plain), f"{form}, {out_features} x {in_features}"
    found: list[tuple[Kernel, int, Timing]] = []
    trials: list[Trial] = []
    for kernel in candidate_kernels(form):
        better, why_not = attempt(f"A product by {kernel.name}", partial(_try_kernel, layer, kernel))
        if better is None:
            trials.append(Trial(f"{shape} by {kernel.name}", False, why_not))
        else:
            found.append((kernel, *better))
    if not found:
        return KernelChoice(trials=(*trials, Trial(f"{shape} by unpacking", True, "no kernel is right and faster")))
    best, most, timing = min(found, key=lambda one: one[2].candidate)
    trials += [Trial(f"{shape} by {one.name}", False, f"{best.name} is faster") for one, *_ in found if one is not best]
    reason = f"right, and for up to {most} tokens faster than unpacking: {timing}"
    return KernelChoice(best, most, (*trials, Trial(f"{shape} by {best.name}", True, reason)))


def _try_kernel(layer: _TriedLinear, kernel: Kernel) -> tuple[int, Timing]:
    """The most tokens for which a kernel is faster than unpacking, and its time for one. Raises `NotBetter`."""
    layer.use(KernelChoice(kernel))
    dense = layer.dense().float()
    noise = torch.randn(TRIED_TOKENS[-1], layer.in_features, generator=torch.Generator().manual_seed(0))
    batches = [noise[:tokens].to(dense.device, torch.bfloat16) for tokens in TRIED_TOKENS]
    for batch in batches:
        expected = batch.float() @ dense.T
        error = float((layer._multiply_packed(batch).float() - expected).norm() / expected.norm())
        if not error < MAX_KERNEL_ERROR:  # also if it is not a number
            raise NotBetter(f"its results are wrong for {len(batch)} tokens: relative error {error:.1e}")
    most, first = 0, Timing(0.0, 0.0)
    for batch in batches:
        timing = _compare(layer, batch)
        first = first if most else timing
        if not timing:
            break
        most = len(batch)
    if not most:
        raise NotBetter(f"right, but not faster than unpacking: {first}")
    return most, first


def _compare(layer: _TriedLinear, tokens: torch.Tensor) -> Timing:
    """How long a product by the kernel takes, and one by unpacking."""

    def finished(multiply: Callable[[torch.Tensor], Any]) -> None:
        multiply(tokens)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize(tokens.device)

    ways = (partial(finished, layer._multiply_packed), partial(finished, layer._multiply_by_parts))
    return is_faster(*ways, rounds=TIMED_ROUNDS, clock=time.perf_counter)
