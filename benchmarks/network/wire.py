"""Costs of the wire formats: bytes per token, and the time to pack, check and unpack hidden states.

    python -m benchmarks.network.wire [--dtype bfloat16]

The hidden states are random, in the dtype that a server computes in. Times are CPU times of one thread, and the formats
are measured alternately, so that other load on the machine matters little. MB/s counts the bytes of the unpacked hidden
states. For the loss of quality see docs/wire.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from benchmarks.common.report import Report, report_parser
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


def measure(report: Report, dtype: str) -> None:
    """Measure every size, number of tokens and format."""
    for width, tokens in itertools.product(HIDDEN_SIZES, TOKENS):
        hidden = torch.randn(tokens, width).to(HIDDEN_DTYPES[dtype])
        for _, wire in itertools.product(report.rounds(f"{width}, {tokens}"), WireFormat):
            payload = encode_tensor(hidden, wire)
            times = {
                "pack": seconds(lambda h=hidden, w=wire: encode_tensor(h, w)),
                "check": seconds(lambda h=hidden, w=wire, p=payload: is_finite(p, h.numel(), w, dtype)),
                "unpack": seconds(lambda h=hidden, w=wire, p=payload: decode_tensor(p, *h.shape, w, dtype, CPU)),
            }
            where = f"hidden {width}, {wire}, {payload_bytes(width, wire, dtype)} bytes a token of {dtype}"
            for what, taken in times.items():
                report.add(f"{what} {tokens}, us", 1e6 * taken, "less", where=where)


def seconds(function: Callable[[], object]) -> float:
    """Mean time of one call, over at least `MIN_TIMING_S`."""
    calls, began = 0, time.thread_time()
    while True:
        function()
        calls += 1
        passed = time.thread_time() - began
        if passed > MIN_TIMING_S:
            return passed / calls


def check_large_payloads(report: Report) -> None:
    """How long `is_finite`, which runs in the network's event loop, takes for `LARGE_VALUES` values."""
    hidden = torch.randn(1, LARGE_VALUES)
    for wire in WireFormat:
        dtype = "float32" if wire is WireFormat.NONE else "bfloat16"
        payload = encode_tensor(hidden, wire)
        for _ in report.rounds(f"NaN and infinity in {LARGE_VALUES:,} values, {wire}, {len(payload) / 1e6:.0f} MB"):
            taken = seconds(lambda p=payload, w=wire, d=dtype: is_finite(p, LARGE_VALUES, w, d))
            report.add("looking for them, ms", 1e3 * taken, "less")


def main() -> None:
    parser = report_parser(__doc__, repeats=7)
    parser.add_argument("--dtype", choices=[*HIDDEN_DTYPES], default="bfloat16", help="that the servers compute in")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with Report(arguments) as report:
        measure(report, arguments.dtype)
        check_large_payloads(report)


if __name__ == "__main__":
    main()
