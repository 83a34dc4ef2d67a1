"""CUDA graphs on a processor: a capture notes every operation with its tensors, and a replay runs them again.

As on a card, a replay reads and writes the same memory, whatever Python would do by then. Whatever Python took from a
tensor while the graph was captured is a constant, and an operation that would have to wait for the card is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.stand_in.devices import NOT_PERMITTED

WAITS_FOR_CARD = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"})
"""Operations whose results Python has to know before it can go on."""

ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations whose results have no values yet."""


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]

    def run(self) -> None:
        found = self.function(*self.args, **self.kwargs)
        for old, new in zip(self.results, _tensors(found), strict=True):
            if old is not new and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class _Capture(TorchDispatchMode):
    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(one.dtype is torch.bool for one in _tensors(args[1:]))
        if name in WAITS_FOR_CARD or by_mask:  # how many values a mask selects, only the card knows
            raise RuntimeError(f"{NOT_PERMITTED} ({name})")
        result = func(*args, **kwargs)
        given = {_storage(one) for one in _tensors((args, kwargs))}
        found = _tensors(result)
        if name in ALLOCATES:
            return result
        if name != "detach" or any(_storage(one) not in given for one in found):
            self._operations.append(_Operation(func, args, kwargs, found))
        return result


class StandInGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []

    @torch.inference_mode()
    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for operation in self._operations:
                operation.run()


class Captures:
    """Which threads capture a graph now.

    Args:
        check: is called before a capture begins; raises what a card that cannot capture would raise.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._here = threading.local()
        self._check = check

    def capturing(self) -> bool:
        """Whether this thread captures a graph."""
        return getattr(self._here, "depth", 0) > 0

    def graph(self, graph: StandInGraph, **options: Any) -> _Capturing:
        """`torch.cuda.graph`: a context whose operations are noted."""
        self._check()
        return _Capturing(self._here, graph)


class _Capturing:
    def __init__(self, here: threading.local, graph: StandInGraph) -> None:
        self._here = here
        self._mode = _Capture(graph._operations)

    def __enter__(self) -> None:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._here.depth -= 1
