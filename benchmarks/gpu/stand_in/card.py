"""`torch.cuda` and torch's attention over pages, replaced by what a processor can do. Counts the calls."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn, overrides

from benchmarks.gpu.stand_in.devices import CARD, CardMode, is_on_card
from benchmarks.gpu.stand_in.graphs import Captures, StandInGraph
from swarm.common.machine import available_memory
from swarm.models.attention.page_pool import PAGE_POSITIONS
from swarm.models.attention.paged_kernels import reference_kernel

NAME = "stand-in for a CUDA card (this processor)"
MEMORY_BYTES = 2 << 30
"""What the stand-in says that it has."""

KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16})
MAX_HEAD_WIDTH = 256


class Calls(Counter[str]):
    """How often each of CUDA's own functions was called."""


class _Event:
    """`torch.cuda.Event`: remembers when it was recorded."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._calls["Event.record"] += 1
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        self._calls["Event.synchronize"] += 1

    def elapsed_time(self, later: _Event) -> float:
        return (later._at - self._at) * 1e3


class _Stream:
    """`torch.cuda.Stream`: everything is finished at once."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def wait_stream(self, other: object) -> None:
        self._calls["Stream.wait_stream"] += 1

    def synchronize(self) -> None:
        self._calls["Stream.synchronize"] += 1


def _nothing(*args: object) -> None: ...


def _kernel(calls: Calls) -> Callable[..., torch.Tensor]:
    """`torch.nn.attention.varlen.varlen_attn`: refuses what FlashAttention 2 refuses, and computes by the reference."""

    @torch.library.custom_op("swarm_stand_in::varlen", mutates_args=())
    def opaque(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: torch.Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        window: Sequence[int],
        enable_gqa: bool,
        lengths: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        left, right = window
        return reference_kernel(
            query, key, value, bounds, None, max_q, max_k, scale=scale, window_size=(left, right),
            enable_gqa=enable_gqa, seqused_k=lengths, block_table=table, num_splits=1,
        )  # fmt: skip

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: Sequence[int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: int = 0,
    ) -> torch.Tensor:
        calls["varlen_attn"] += 1
        if query.dtype not in KERNEL_DTYPES:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if query.shape[-1] % 8 or query.shape[-1] > MAX_HEAD_WIDTH:
            raise RuntimeError("FlashAttention wants heads of a multiple of 8 and at most 256 values")
        if key.shape[1] % PAGE_POSITIONS:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {PAGE_POSITIONS}")
        return torch.ops.swarm_stand_in.varlen(
            query, key, value, cu_seq_q, max_q, max_k, scale, list(window_size), enable_gqa, seqused_k, block_table
        )

    return varlen_attn


def _export(export: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.export.export`: traces tensors of the processor, which these are, and lets the trace name the card.

    torch traces with tensors that hold nothing. Ones that say they are on a card ask CUDA for it, which is not here.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        with overrides._pop_mode_temporarily():
            program = export(*args, **kwargs)
        for node in program.graph.nodes:
            node.args = tuple(map(_on_card, node.args))
            node.kwargs = {name: _on_card(value) for name, value in node.kwargs.items()}
        return program

    return traced


def _on_card(value: Any) -> Any:
    return CARD if isinstance(value, torch.device) else value


@contextmanager
def _without(package: str) -> Iterator[None]:
    """A context in which a package is not installed. Other modules that are imported meanwhile stay."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[package]
        else:
            sys.modules[package] = before


@contextmanager
def card(check_capture: Callable[[], None] = _nothing) -> Iterator[Calls]:
    """A context in which torch has a card, in this thread and in those that start meanwhile."""
    calls = Calls()
    captures = Captures(check_capture)
    mode = CardMode(captures.capturing)
    run, parameter = threading.Thread.run, nn.Parameter.__new__

    def run_with_card(self: threading.Thread) -> None:
        with mode:
            run(self)

    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = parameter(cls, data, requires_grad)
        if isinstance(data, torch.Tensor) and is_on_card(data):
            made.data = data
        return made

    from torch.nn.attention import varlen

    with (
        mock.patch.multiple(torch.cuda, **_functions(calls, captures)),
        _without("bitsandbytes"),  # it talks to a real card
        mock.patch.object(varlen, "varlen_attn", _kernel(calls)),
        mock.patch.object(torch.export, "export", _export(torch.export.export)),
        mock.patch.object(threading.Thread, "run", run_with_card),
        mock.patch.object(nn.Parameter, "__new__", new_parameter),
        mode,
    ):
        yield calls


def _functions(calls: Calls, captures: Captures) -> dict[str, Any]:
    """What takes the place of `torch.cuda`'s functions and classes, by name."""

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    most = [0]

    def used() -> int:
        free = min(available_memory(), MEMORY_BYTES)
        return MEMORY_BYTES - free

    def allocated(device: object = None) -> int:
        most[0] = max(most[0], used())
        return used()

    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=1, L2_cache_size=1 << 20
    )
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - used(), MEMORY_BYTES),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": lambda device=None: max(most[0], used()),
        "reset_peak_memory_stats": lambda device=None: most.__setitem__(0, 0),
        "graph_pool_handle": lambda: (0, 1),
        "graph": captures.graph,
        "CUDAGraph": StandInGraph,
        "Stream": lambda *args, **kwargs: _Stream(calls),
        "current_stream": lambda device=None: _Stream(calls),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "Event": lambda *args, **kwargs: _Event(calls),
        "is_current_stream_capturing": captures.capturing,
    }
    return {name: counted(name, function) for name, function in functions.items()}


__all__ = ["CARD", "NAME", "Calls", "card"]
