"""Measures how fast this device computes a token of any model. Runs in a process of its own, which prints JSON.

    python -m swarm.ring.worker.device_measurement [--device DEVICE]

A decode step reads every weight once, so its time is that of reading, and what each block costs beside it. Both are
measured without a model: matrices of a usual size, which together do not fit into a cache, and the operations of a
block so small that its weights count for nothing. The process ends afterwards, and with it what torch and a GPU's
driver take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import click
import msgspec
import torch

from swarm.common import console
from swarm.protocol.messages.peers import DtypeName
from swarm.ring.worker.device import DeviceSpeed
from swarm.server.memory_budget import resolve_device

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROWS, COLUMNS = 2048, 2048
MATRICES = 12
"""Matrices that are read in turn: 50 to 200 MB, more than a cache holds."""

READING_S = 0.25
"""How long reading is measured for each dtype."""

SMALL = 64
SMALL_STEPS = 30
"""Values of the small block's hidden state, and how often it is computed."""


def measure_device(device: torch.device) -> DeviceSpeed:
    """Measure a device, in a second or two."""
    with torch.inference_mode():
        rates = {name: _read_rate(device, dtype) for name, dtype in DTYPES.items()}
        block_seconds = _block_seconds(device)
    if device.type == "cuda":
        label, memory = torch.cuda.get_device_name(device), int(torch.cuda.mem_get_info(device)[0])
        return DeviceSpeed(str(device), label, rates, block_seconds, memory)
    return DeviceSpeed(str(device), f"{device.type}, {torch.get_num_threads()} threads", rates, block_seconds)


def _read_rate(device: torch.device, dtype: torch.dtype) -> float:
    matrices = [torch.full((ROWS, COLUMNS), 0.01, dtype=dtype, device=device) for _ in range(MATRICES)]
    token = torch.ones(1, COLUMNS, dtype=dtype, device=device)
    read, spent = 0, 0.0
    torch.nn.functional.linear(token, matrices[0])  # a first call sets things up
    while spent < READING_S:
        for matrix in matrices:
            spent += _timed(device, partial(torch.nn.functional.linear, token, matrix))
            read += matrix.nbytes
            if spent >= 4 * READING_S:  # a processor that computes this dtype bit by bit
                break
    return read / max(spent, 1e-9)


def _block_seconds(device: torch.device) -> float:
    matrix = torch.full((SMALL, SMALL), 0.01, device=device)
    token, cache = torch.ones(1, SMALL, device=device), torch.ones(1, 1, 8, SMALL, device=device)

    def block() -> torch.Tensor:
        hidden = torch.nn.functional.rms_norm(token, (SMALL,))
        for _ in range(4):
            hidden = torch.nn.functional.linear(hidden, matrix)
        hidden = hidden * 0.5 + torch.cat((hidden[:, SMALL // 2 :], hidden[:, : SMALL // 2]), dim=-1) * 0.5
        attended = torch.nn.functional.scaled_dot_product_attention(hidden[None, None], cache, cache)[0, 0]
        hidden = torch.nn.functional.rms_norm(token + attended, (SMALL,))
        gate = torch.nn.functional.silu(torch.nn.functional.linear(hidden, matrix))
        for _ in range(2):
            hidden = torch.nn.functional.linear(hidden * gate, matrix)
        return token + hidden

    block()
    return sorted(_timed(device, block) for _ in range(SMALL_STEPS))[SMALL_STEPS // 2]


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@click.command()
@click.option("--device", default="auto")
@console.errors_to_exit_codes
def main(device: str) -> None:
    """Print a `DeviceSpeed` as JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(measure_device(resolve_device(device))))


if __name__ == "__main__":
    main(prog_name="python -m swarm.ring.worker.device_measurement")
