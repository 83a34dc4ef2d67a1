"""Costs of the wire formats: bytes per token, and the time to pack, check and unpack hidden states.

    python -m benchmarks.network.wire [--dtype bfloat16] [--repeats 7] [--json FILE]

The hidden states are random, in the dtype that a server computes in. Times are CPU times of one thread, and the formats
are measured alternately, so that other load on the machine matters little. MB/s counts the bytes of the unpacked hidden
states. For the loss of quality see docs/wire.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.common.tables import spread
from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.data_structures import WireFormat
from swarm.protocol.compression import decode_tensor, encode_tensor, is_finite, payload_bytes

HIDDEN_SIZES = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = (1, 128)
LARGE_VALUES = 1 << 26
"""Number of values in the largest payload that is measured: 134 MB in 16 bits."""

MIN_TIMING_S = 0.01
"""Minimum duration of one timing."""

CPU = torch.device("cpu")


@dataclass
class Costs:
    """Costs of one hidden size, number of tokens and format. Times are in seconds, by repetition."""

    hidden_size: int
    tokens: int
    wire: WireFormat
    length: int
    pack: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    unpack: list[float] = field(default_factory=list)


def measure(dtype: str, repeats: int) -> list[Costs]:
    """Measure every size, number of tokens and format."""
    found = []
    for hidden_size, tokens in itertools.product(HIDDEN_SIZES, TOKENS):
        hidden = torch.randn(tokens, hidden_size).to(HIDDEN_DTYPES[dtype])
        costs = [Costs(hidden_size, tokens, wire, payload_bytes(hidden.numel(), wire, dtype)) for wire in WireFormat]
        for _, one in itertools.product(range(repeats), costs):
            _once(one, hidden, dtype)
        found += costs
    return found


def _once(costs: Costs, hidden: torch.Tensor, dtype: str) -> None:
    wire, (tokens, width) = costs.wire, hidden.shape
    payload = encode_tensor(hidden, wire)
    costs.pack.append(seconds(lambda: encode_tensor(hidden, wire)))
    costs.check.append(seconds(lambda: is_finite(payload, hidden.numel(), wire, dtype)))
    costs.unpack.append(seconds(lambda: decode_tensor(payload, tokens, width, wire, dtype, CPU)))


def seconds(function: Callable[[], object]) -> float:
    """Mean time of one call, over at least `MIN_TIMING_S`."""
    calls, began = 0, time.thread_time()
    while True:
        function()
        calls += 1
        passed = time.thread_time() - began
        if passed > MIN_TIMING_S:
            return passed / calls


def checks_of_large_payloads(repeats: int) -> dict[str, list[float]]:
    """Seconds that `is_finite`, which runs in the network's event loop, takes for `LARGE_VALUES` values."""
    hidden = torch.randn(1, LARGE_VALUES)
    found: dict[str, list[float]] = {}
    for wire, dtype in (
        (WireFormat.NONE, "float32"),
        *((wire, "bfloat16") for wire in WireFormat if wire is not WireFormat.NONE),
    ):
        payload = encode_tensor(hidden, wire)
        title = f"{wire}, {len(payload) / 1e6:.0f} MB"
        found[title] = [
            seconds(lambda p=payload, w=wire, d=dtype: is_finite(p, LARGE_VALUES, w, d)) for _ in range(repeats)
        ]
    return found


def table(found: list[Costs], dtype: str) -> str:
    """Format the results in Markdown: medians, and the range for 8 bits, which takes longest."""
    lines = [
        f"Hidden states in {dtype}; median of the repeats, for 1 and for {TOKENS[1]} tokens",
        "",
        "| hidden | format | bytes a token | of 16 bits | pack ms, 1 | unpack ms, 1 | pack ms, 128 | MB/s "
        "| unpack ms, 128 | MB/s |",
        f"|{' --- |' * 10}",
    ]
    for one, many in zip(found, found[len(WireFormat) :], strict=False):
        if (one.tokens, many.tokens) != TOKENS:
            continue
        size = payload_bytes(one.hidden_size, one.wire, dtype)
        ratio = size / payload_bytes(one.hidden_size, WireFormat.BFLOAT16, dtype)
        raw = many.hidden_size * many.tokens * HIDDEN_DTYPES[dtype].itemsize / 1e6
        packing, unpacking = statistics.median(many.pack), statistics.median(many.unpack)
        lines.append(
            f"| {one.hidden_size} | {one.wire} | {size} | {ratio:.3f} | {_milliseconds(one.pack)} "
            f"| {_milliseconds(one.unpack)} | {_milliseconds(many.pack)} | {raw / packing:.0f} "
            f"| {_milliseconds(many.unpack)} | {raw / unpacking:.0f} |"
        )
    return "\n".join(lines)


def _milliseconds(times: list[float]) -> str:
    return f"{1e3 * statistics.median(times):.3f}"


def table_of_checks(checks: dict[str, list[float]]) -> str:
    lines = [f"Looking for NaN and infinity in {LARGE_VALUES:,} values, in the network's loop:", ""]
    lines += ["| payload | ms, median (range) |", "| --- | --- |"]
    lines += [f"| {title} | {spread([1e3 * one for one in times], 1)} |" for title, times in checks.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=[*HIDDEN_DTYPES], default="bfloat16", help="that the servers compute in")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the raw figures here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.describe()
    found = measure(arguments.dtype, arguments.repeats)
    checks = checks_of_large_payloads(arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(found, arguments.dtype), table_of_checks(checks), sep="\n\n")
    if arguments.json:
        figures = {"machine": about, "costs": [asdict(one) for one in found], "checks": checks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
