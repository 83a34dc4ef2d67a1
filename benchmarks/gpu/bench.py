"""What a case is given, and what it may say."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from swarm.models.execution.cuda_graphs import CudaGraphRecorder, GraphRecorder, Replay

T = TypeVar("T")

Value = float | int | str


class WrongResult(Exception):
    """Something was computed, and it is not what the reference computes."""


class NotHere(Exception):
    """This machine cannot do it; the message says why."""


@dataclass(frozen=True)
class Found:
    """What a case has found.

    Attributes:
        values: figures by name, with their unit in the name.
        goal: what a figure should be; "" if there is no goal.
        met: whether it is.
    """

    values: dict[str, Value] = field(default_factory=dict)
    goal: str = ""
    met: bool = True


@dataclass(frozen=True)
class Case:
    """One thing to check or measure. It raises `WrongResult`, `NotHere`, or whatever goes wrong."""

    name: str
    run: Callable[[], Found]


@dataclass(frozen=True)
class Bench:
    """A machine. Without a GPU, everything is small and runs on the processor, so that the command itself is tested."""

    device: torch.device

    @property
    def real(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    def sized(self, on_gpu: T, without: T) -> T:
        """The first on a GPU; the second, which is small, without one."""
        return on_gpu if self.real else without

    def recorder(self) -> GraphRecorder:
        """Records CUDA graphs; without a GPU, the function is called again."""
        return CudaGraphRecorder(self.device) if self.real else _call_again

    def free_bytes(self) -> int:
        """Memory of the GPU that is free."""
        gc.collect()
        if not self.real:
            return 1 << 28
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def seconds(self, function: Callable[[], object], repeats: int = 10) -> float:
        """Median wall-clock time of a call, until all of it is computed. Three calls before are not counted."""
        times = []
        for _ in range(3 + repeats):
            self._wait()
            began = time.perf_counter()
            function()
            self._wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[3:])

    def _wait(self) -> None:
        if self.real:
            torch.cuda.synchronize(self.device)

    def bandwidth(self) -> float:
        """Bytes/s of the memory: the larger of what a copy moves and of what a sum reads."""
        source = torch.ones(self.sized(2 << 30, 16 << 20) // 4, device=self.device)
        target, size = torch.empty_like(source), source.nbytes
        return max(2 * size / self.seconds(lambda: target.copy_(source)), size / self.seconds(source.sum))

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a large matrix product of random numbers."""
        size = self.sized(8192, 256)
        left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: left @ right)


def _call_again(function: Callable[[], None]) -> Replay:
    function()
    return function
