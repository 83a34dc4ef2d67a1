"""What caches of experts read, beside the best possible one: `python -m benchmarks.flash.experts.cache`.

Plays the trace of a small trained mixture of experts (128 experts a layer, 8 a token; `scripts/record_expert_trace.py`)
through the cache that serves, with different rules for which experts stay, and through Belady's optimum. The texts of
the trace follow one another, as sessions do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.common.machine import describe
from benchmarks.common.tables import table
from benchmarks.flash.experts.routing_trace import Trace, fewest_reads, overlap, reads
from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from swarm.models.flash.stay_priority import DecayedFrequency

TRACE = Path(__file__).with_name("trace.npz")
SHARES = (0.125, 0.25, 0.5, 0.75)
HALF_LIVES = (8.0, 64.0, 128.0)
WARM_UP_TOKENS = 128
"""Tokens that are not counted: a cache is empty only once."""


def load_trace(path: Path = TRACE) -> Trace:
    """The trace of all texts, `[tokens, blocks, experts a token]`."""
    with np.load(path) as texts:
        return np.concatenate([texts[name] for name in sorted(texts.files)]).astype(np.int64)


def measure(trace_TBK: Trace, experts: int, share: float) -> list[str]:
    """A row: the share of needed experts that each cache reads, and how many times Belady's that is."""
    _, blocks, _ = trace_TBK.shape
    slots = int(share * blocks * experts)
    counts = {
        "LRU": reads(trace_TBK, slots, LeastRecentlyUsed(blocks, experts)),
        "LRU a block": sum(
            reads(trace_TBK[:, [block]], slots // blocks, LeastRecentlyUsed(1, experts)) for block in range(blocks)
        ),
        **{
            f"frequency {half_life:.0f}": reads(trace_TBK, slots, DecayedFrequency(blocks, experts, half_life))
            for half_life in HALF_LIVES
        },
    }
    needed = trace_TBK[WARM_UP_TOKENS:].size
    best = fewest_reads(trace_TBK, slots)[WARM_UP_TOKENS:].sum()
    cells = [
        f"{one[WARM_UP_TOKENS:].sum() / needed:.3f} ({one[WARM_UP_TOKENS:].sum() / best:.2f})"
        for one in counts.values()
    ]
    return [f"{share:.3f}", f"{best / needed:.3f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--experts", type=int, default=128)
    options = parser.parse_args()
    trace_TBK = load_trace(options.trace)
    print(describe(), "\n")
    print(
        f"{len(trace_TBK)} tokens, {trace_TBK.shape[1]} blocks; a token shares {overlap(trace_TBK):.0%} of its experts"
    )
    print("with the token before it. Share of the needed experts that is read (times the best possible):\n")
    heading = ["experts in memory", "best possible", "LRU", "LRU, slots a block"]
    heading += [f"frequency, half-life {half_life:.0f}" for half_life in HALF_LIVES] + ["both speeds, as served"]
    print(table(heading, [measure(trace_TBK, options.experts, share) for share in SHARES]))


if __name__ == "__main__":
    main()
