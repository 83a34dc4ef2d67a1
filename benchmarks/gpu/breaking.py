"""Faults on purpose: a kernel that computes something else, a capture that fails, no memory, a process that ends.

Each of them shows that the rest of the command goes on, that the report names what failed, and that the product falls
back to a way that works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args
from unittest import mock

import torch

Fault = Literal["kernel", "decode", "capture", "memory", "error", "crash", "hang"]
FAULTS: tuple[str, ...] = get_args(Fault)
"""What can be broken.

kernel: attention over pages, and kernels for packed weights, return values that are a tenth too large.
decode: attention over pages returns noise for steps of single tokens only.
capture: CUDA refuses to capture a graph.
memory: the pool of pages finds no memory when it grows.
error: the first case meets an illegal memory access, after which the card's context is lost.
crash: the process ends without a word at its second case.
hang: the second case never ends.
"""

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


def parse(text: str) -> tuple[str, str]:
    """STEP=FAULT. Raises `ValueError` for anything else."""
    step, _, fault = text.partition("=")
    if not step or fault not in FAULTS:
        raise ValueError(f"--break {text}: give STEP=FAULT, with one of {', '.join(FAULTS)}")
    return step, fault


@contextmanager
def broken(fault: str | None) -> Iterator[Callable[[int], None]]:
    """A context with this fault, or with none.

    Yields:
        a function that is called with the number of each case before it runs.
    """
    with contextlib.ExitStack() as stack:
        if fault == "kernel":
            stack.enter_context(_wrong_kernel())
            stack.enter_context(_wrong_products())
        if fault == "decode":
            stack.enter_context(_wrong_for_single_tokens())
        if fault == "capture":
            stack.enter_context(mock.patch.object(torch.cuda, "graph", _no_capture))
        if fault == "memory":
            stack.enter_context(_no_pages())
        yield _before_case(fault)


def _before_case(fault: str | None) -> Callable[[int], None]:
    def before(number: int) -> None:
        if fault == "error" and number == 0:
            raise RuntimeError(ILLEGAL_ACCESS)
        if fault == "crash" and number == 1:
            os._exit(139)
        while fault == "hang" and number == 1:
            time.sleep(0.1)

    return before


def _wrong_kernel() -> Any:
    from torch.nn.attention import varlen

    right = varlen.varlen_attn

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) * 1.1

    return mock.patch.object(varlen, "varlen_attn", wrong)


def _wrong_products() -> Any:
    from swarm.models.weights import gpu_linears

    right = gpu_linears._by_torch

    def wrong(tokens: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, step: int = 0) -> torch.Tensor:
        return right(tokens, values, scales) * 1.1

    return mock.patch.multiple(gpu_linears, _by_torch=wrong, _by_triton=wrong)


def _wrong_for_single_tokens() -> Any:
    from torch.nn.attention import varlen

    right = varlen.varlen_attn

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, most_new = right(*args, **kwargs), args[5]
        return torch.randn_like(output) * 100 if most_new == 1 else output

    return mock.patch.object(varlen, "varlen_attn", wrong)


def _no_capture(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _no_pages() -> Any:
    from swarm.models.attention.page_pool import PagePool

    def refuse(self: PagePool, like: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return mock.patch.object(PagePool, "_empty", refuse)
