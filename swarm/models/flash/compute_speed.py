"""How fast this machine multiplies, measured in a second or two: what the cost model needs beside the drive."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from swarm.models.flash.cost_model import ComputeSpeed
from swarm.models.flash.record_buffer import RecordBuffer
from swarm.models.flash.record_layout import RecordLayout
from swarm.models.weights.frozen_linear import PrepackedLinear, can_prepack

TOKENS = (1, 2, 4, 8, 32, 128)
"""Tokens computed together, as far as `MAX_S` goes."""

WEIGHT_BYTES = 128 << 20
"""Bytes of weights of a measurement: more than processors have of cache."""

REPEATS = 5
MAX_S = 0.5
"""Seconds after which no larger number of tokens is tried."""


def resident_speed(hidden: int, dtype: torch.dtype) -> ComputeSpeed:
    """The speed of weights as servers hold them in memory (`weights.frozen_linear`)."""
    linear = nn.Linear(hidden, _rows(hidden, dtype), bias=False, dtype=dtype).requires_grad_(False)
    weight_bytes = linear.weight.nbytes
    product = PrepackedLinear(linear) if can_prepack(dtype) else linear
    return _measured(product, hidden, dtype, weight_bytes)


def record_speed(layout: RecordLayout) -> ComputeSpeed:
    """The speed of products with records that lie in memory as `layout` says.

    Neurons are rows of strided matrices; the tensors of experts and blocks are whole.
    """
    last = layout.fields[-1]
    hidden = last.shape[-1] if len(last.shape) == 1 else max(field.shape[-1] for field in layout.fields)
    if any(len(field.shape) > 1 for field in layout.fields):
        weight_TH = torch.randn(_rows(hidden, layout.dtype), hidden).to(layout.dtype)
        return _measured(lambda inputs_TH: F.linear(inputs_TH, weight_TH), hidden, layout.dtype, weight_TH.nbytes)
    buffer = RecordBuffer(layout, max(1, min(layout.count, WEIGHT_BYTES // layout.stride)))
    matrices = [buffer.field(field.tensor) for field in layout.fields if field.shape == (hidden,)]
    for matrix_RH in matrices:
        matrix_RH.normal_()

    def products(inputs_TH: torch.Tensor) -> None:
        for matrix_RH in matrices[:-1]:
            inner_TR = F.linear(inputs_TH, matrix_RH)
        _ = inner_TR @ matrices[-1]

    return _measured(products, hidden, layout.dtype, buffer.nbytes)


def move_speed(stride: int) -> float:
    """Seconds for each byte of a record that moves to another slot."""
    slots = max(2, WEIGHT_BYTES // stride // 2 * 2)
    data = torch.zeros(slots, stride, dtype=torch.uint8)
    order = torch.randperm(slots)
    sources, targets = order[: slots // 2], order[slots // 2 :]

    def move() -> None:
        data[targets] = data[sources]

    return _seconds(move) / (len(sources) * stride)


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
    return statistics.median(times)


def _rows(hidden: int, dtype: torch.dtype) -> int:
    return max(1, WEIGHT_BYTES // (hidden * dtype.itemsize))
