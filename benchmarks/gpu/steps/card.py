"""What there is: the card, its driver, and how fast it reads and multiplies."""

from __future__ import annotations

import platform
from functools import partial
from unittest import mock

import torch

from benchmarks.common.machine import version_of
from benchmarks.gpu.bench import Bench, Case, Step, WrongResult, seconds_of
from benchmarks.gpu.records import Measured
from swarm.cli.doctor import machine_checks
from swarm.cli.doctor.verdicts import Verdict

COPIED_BYTES = 2 << 30
"""Far more than any cache of a card holds."""

MATRIX_SIZE = 8192
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("torch", "transformers", "triton", "bitsandbytes", "msgspec", "hivemind")


def _cases(bench: Bench) -> list[Case]:
    return [
        Case("what there is", _what_there_is, 1.0),
        Case("memory", _memory, 3.0),
        *(Case(f"matrix {name}", partial(_matrix, name=name), 2.0) for name in DTYPES),
        Case("a launch", _launch, 1.0),
        Case("swarm doctor", _doctor, 8.0),
    ]


STEP = Step("card", "The card", 30.0, _cases)


def _what_there_is(bench: Bench) -> Measured:
    properties = torch.cuda.get_device_properties(bench.device)
    free, total = torch.cuda.mem_get_info(bench.device)
    values: dict[str, float | int | str] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GB": total / 1e9,
        "free GB": free / 1e9,
        "CUDA": str(torch.version.cuda),
        "driver": _driver(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }
    return Measured(values)


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return "none"


def read_bandwidth(bench: Bench) -> float:
    """Bytes/s of the card's memory: the larger of what a copy moves and of what a sum reads."""
    copied, summed = _bandwidths(bench)
    return max(copied, summed)


def _bandwidths(bench: Bench) -> tuple[float, float]:
    size = bench.sized(COPIED_BYTES, 16 << 20)
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    copying = seconds_of(bench.device, lambda: target.copy_(source))
    summing = seconds_of(bench.device, source.sum)
    return 2 * size / copying, size / summing


def _memory(bench: Bench) -> Measured:
    copied, summed = _bandwidths(bench)
    return Measured({"copy GB/s": copied / 1e9, "sum GB/s": summed / 1e9, "bandwidth": max(copied, summed)})


def matrix_rate(bench: Bench, name: str = "bf16") -> float:
    """Operations a second of a large matrix product of random numbers."""
    size = bench.sized(MATRIX_SIZE, 256)
    left, right = (torch.randn(size, size, device=bench.device).to(DTYPES[name]) for _ in range(2))
    return 2 * size**3 / seconds_of(bench.device, lambda: left @ right, repeats=10)


def _matrix(bench: Bench, name: str) -> Measured:
    rate = matrix_rate(bench, name)
    return Measured({"TFLOP/s": rate / 1e12, "rate": rate})


def _launch(bench: Bench) -> Measured:
    """How long the host takes to launch a kernel that does next to nothing."""
    one, count = torch.zeros(1, device=bench.device), bench.sized(1000, 20)

    def launch() -> None:
        for _ in range(count):
            one.add_(1)

    return Measured({"us a kernel": seconds_of(bench.device, launch) / count * 1e6})


def _doctor(bench: Bench) -> Measured:
    """What `swarm doctor` says of the card, and which way of computing it takes, and why."""
    hidden = bench.sized(machine_checks.TRIED_HIDDEN, 256)
    with mock.patch.object(machine_checks, "TRIED_HIDDEN", hidden):
        found = [machine_checks.check_gpu("auto"), machine_checks.check_execution("auto")]
    if any(one.verdict is Verdict.FAILURE for one in found) or not machine_checks.computes_on_gpu("auto"):
        raise WrongResult("; ".join(one.found for one in found))
    return Measured({one.check: str(one.verdict) for one in found}, note="; ".join(one.found for one in found))
