"""Tiny models of the zoo on the card, and the same ones on the processor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import NotHere, WrongResult
from swarm.common.trials import attempt
from swarm.data_structures import Span
from swarm.models.attention.page_pool import PagePool
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.attention.paged_kernels import PagedKernel, agrees_with_reference, candidate_kernels
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.execution.cuda_graphs import GraphRecorder
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.trials.layout_trials import LayoutRequest
from swarm.models.loading.span_loading import load_span
from swarm.models.weights import quantization
from tests import zoo

CPU = torch.device("cpu")
POSITIONS = 4096
"""More than the zoo's models have, so that sequences have several pages of 256 positions."""

PAGE_HEADS = (8, 16, 64, 80, 128)


def checkpoint_of(family: str, **overrides: Any) -> Checkpoint:
    """A tiny model of a family. Raises `NotHere` if this version of transformers does not know the family."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-"))
    try:
        model = zoo.make_model(family, **overrides)
    except (ValueError, KeyError, ImportError) as error:
        raise NotHere(f"this version of transformers has no {family}: {str(error).splitlines()[0]}") from error
    model.save_pretrained(folder)
    return open_checkpoint(folder)


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    layout: LayoutRequest = "auto",
    quant: str = quantization.NONE,
) -> SpanModel:
    """Blocks from the middle of a tiny model."""
    return load_span(checkpoint, Span(1, 4), dtype=dtype, device=device, layout=layout, quant=quant)


def right_kernel(device: torch.device, dtype: torch.dtype, width: int = 8, heads: int = 2) -> tuple[str, PagedKernel]:
    """The first of the card's kernels that agrees with the reference, and its name.

    Raises `WrongResult` if none does: the caller wants to see pages at work.
    """
    said = []
    for kernel in candidate_kernels(device):
        pages = torch.zeros(1, 256, heads, width, dtype=dtype, device=device)
        agrees, why_not = attempt(_name(kernel), partial(agrees_with_reference, kernel, pages))
        if agrees:
            return _name(kernel), kernel
        said.append(f"{_name(kernel)}: {why_not or 'wrong results'}")
    raise WrongResult("; ".join(said))


def _name(kernel: PagedKernel) -> str:
    return str(getattr(kernel, "__name__", kernel))


def in_pages(model: SpanModel, kernel: PagedKernel, recorder: GraphRecorder | None = None) -> SpanModel:
    """The model with a paged cache of its own, whatever the trials would choose."""
    return model.with_strategy(ExecutionStrategy("paged", PagedAttention(PagePool(), kernel), graph_recorder=recorder))


def recorded(model: SpanModel, recorder: GraphRecorder) -> SpanModel:
    """The model in pages with recorded decode steps."""
    return model.with_strategy(replace(model.strategy, graph_recorder=recorder))


def counted(recorder: GraphRecorder) -> tuple[GraphRecorder, Callable[[], tuple[int, int]]]:
    """A recorder that counts, and a function that says how many graphs were made and replayed."""
    counts = [0, 0]

    def record(function: Callable[[], None]) -> Callable[[], None]:
        replay = recorder(function)
        counts[0] += 1

        def counting() -> None:
            counts[1] += 1
            replay()

        return counting

    return record, lambda: (counts[0], counts[1])
