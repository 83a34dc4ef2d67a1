"""How fast this machine multiplies, measured in a second or two: what the cost model needs beside the drive."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from swarm.models.flash.costs.cost_model import ComputeSpeed, MachineSpeed, ReadingSpeed
from swarm.models.flash.neurons.neuron_products import NeuronProducts
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.records.record_buffer import RecordBuffer
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.models.weights.frozen_linear import PrepackedLinear, can_prepack

TOKENS = (1, 2, 4, 8, 32, 128)
"""Tokens computed together, as far as `MAX_S` goes."""

WEIGHT_BYTES = 128 << 20
"""Bytes of weights of a measurement: more than processors have of cache."""

REPEATS = 9
BLOCK_S = 1e-3
"""What a block costs beyond its weights (Python, norms, attention scores), on processors of 2020 and later."""

MAX_S = 0.5
"""Seconds after which no larger number of tokens is tried."""


def machine_speed(
    drive: ReadingSpeed, plan: BlockPlan, layout: RecordLayout, hidden: int, activation: nn.Module | None = None
) -> MachineSpeed:
    """Measure what the cost model needs to know of this machine, beside its drive, for blocks of one kind.

    Args:
        plan, layout: of one of the blocks.
        hidden: its hidden size.
        activation: of its sparse layer, for blocks that select neurons.
    """
    resident = resident_speed(hidden, layout.dtype)
    if plan.kind is RecordKind.NEURONS and activation is not None:
        return MachineSpeed(drive, resident, neuron_speed(plan, layout, activation), move_speed(layout), BLOCK_S)
    records = expert_speed(layout) if plan.kind is RecordKind.EXPERTS else plain_speed(hidden, layout.dtype)
    return MachineSpeed(drive, resident, records, 0.0, BLOCK_S)


def resident_speed(hidden: int, dtype: torch.dtype) -> ComputeSpeed:
    """The speed of weights as servers hold them in memory (`weights.frozen_linear`)."""
    linear = nn.Linear(hidden, _rows(hidden, dtype), bias=False, dtype=dtype).requires_grad_(False)
    weight_bytes = linear.weight.nbytes
    product = PrepackedLinear(linear) if can_prepack(dtype) else linear
    return _measured(product, hidden, dtype, weight_bytes)


def plain_speed(hidden: int, dtype: torch.dtype) -> ComputeSpeed:
    """The speed of weights as they come from files: whole tensors, for streamed blocks."""
    weight_RH = torch.randn(_rows(hidden, dtype), hidden).to(dtype)
    return _measured(lambda inputs_TH: F.linear(inputs_TH, weight_RH), hidden, dtype, weight_RH.nbytes)


def expert_speed(layout: RecordLayout) -> ComputeSpeed:
    """The speed of experts, in seconds for each byte of their records: one after the other, matrix by matrix, which is
    slower than one large matrix."""
    buffer = RecordBuffer(layout, max(2, min(layout.count, WEIGHT_BYTES // layout.stride)))
    matrices = [buffer.field(field.tensor).normal_() for field in layout.fields if len(field.shape) == 2]
    widths = {matrix.shape[-1] for matrix in matrices}

    def compute(inputs_T1: torch.Tensor) -> None:
        inputs = {width: inputs_T1.expand(-1, width).contiguous() for width in widths}
        for slot in range(buffer.slots):
            for matrix in matrices:
                torch.mm(inputs[matrix.shape[-1]], matrix[slot].T)

    return _measured(compute, 1, layout.dtype, buffer.slots * layout.stride)


def neuron_speed(plan: BlockPlan, layout: RecordLayout, activation: nn.Module, active: float = 1 / 3) -> ComputeSpeed:
    """The speed of neurons that are selected among those in memory, in seconds for each byte of their records.

    Args:
        plan: of a block with sparse neurons.
        layout: of its records.
        activation: of the block.
        active: share of the selected neurons whose activation is not zero.
    """
    hidden = layout.fields[0].shape[0]
    buffer = RecordBuffer(layout, max(2, min(layout.count, WEIGHT_BYTES // layout.stride)))
    for field in layout.fields:
        buffer.field(field.tensor).normal_()
    products = NeuronProducts(plan, activation, None)
    rows = products.rows(buffer, {})
    places = torch.randperm(buffer.slots)[: buffer.slots // 2].sort().values
    chosen = torch.rand(max(TOKENS), len(places)) < active

    def compute(hidden_TH: torch.Tensor) -> None:
        values_TN = products.neurons(hidden_TH, rows, places)
        products.down(chosen[: len(hidden_TH)].to(values_TN.dtype), rows, places)

    return _measured(compute, hidden, layout.dtype, len(places) * layout.stride)


def move_speed(layout: RecordLayout) -> float:
    """Seconds for each byte of a record that moves to another slot."""
    buffer = RecordBuffer(layout, max(2, WEIGHT_BYTES // layout.stride // 2 * 2))
    buffer.data.zero_()
    order = torch.randperm(buffer.slots).numpy()
    sources, targets = order[: buffer.slots // 2], order[buffer.slots // 2 :]
    return _seconds(lambda: buffer.move(sources, targets)) / (len(sources) * layout.stride)


@torch.inference_mode()
def _measured(product: Callable[[torch.Tensor], object], hidden: int, dtype: torch.dtype, size: int) -> ComputeSpeed:
    points: list[tuple[int, float]] = []
    for tokens in TOKENS:
        inputs_TH = torch.randn(tokens, hidden).to(dtype)
        taken = _seconds(partial(product, inputs_TH))
        slowest = max((seconds for _, seconds in points), default=0.0)
        points.append((tokens, max(taken / size, slowest)))
        if taken * REPEATS > MAX_S:
            break
    return ComputeSpeed(tuple(points))


def _seconds(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < MAX_S):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.fmean(times)  # what other programs take will be taken from tokens too


def _rows(hidden: int, dtype: torch.dtype) -> int:
    return max(1, WEIGHT_BYTES // (hidden * dtype.itemsize))
