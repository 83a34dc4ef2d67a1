"""Experts on flash at a quarter of the memory, against the same span through mmap with as much room in the page cache.

Shapes of Qwen3-30B-A3B in 16 bits. A ballast of locked memory squeezes the page cache, see `ballast`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.common.tables import spread, table, times
from benchmarks.flash.experts.ballast import MIN_AVAILABLE_BYTES, Ballast, available_bytes
from benchmarks.flash.experts.blocks import QWEN3, MoeBlocks, MoeShape, write_files
from benchmarks.flash.experts.cache import load_trace
from benchmarks.flash.experts.routing_trace import Trace, fewest_reads, overlap, reads
from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.reading import FlashStore
from swarm.models.flash.stay_priority import DecayedFrequency

RESIDENT_SHARE = 0.25
WARM_UP_TOKENS = 48
FLASH_TOKENS, MAPPED_TOKENS = 24, 12
"""Tokens of a round."""

DTYPE = torch.bfloat16
HEADING = ("experts", "tokens/s", "times mmap", "GB a token", "hits")


@dataclass
class Span:
    """Blocks, and where a text in them has come.

    Attributes:
        rates: tokens a second, by round.
    """

    blocks: MoeBlocks
    hidden: int
    position: int = 0
    cache: DynamicCache = field(default_factory=DynamicCache)
    rates: list[float] = field(default_factory=list)

    @torch.inference_mode()
    def seconds(self, tokens: int) -> float:
        """Time of so many tokens."""
        hidden_T11H = torch.randn(tokens, 1, 1, self.hidden).to(DTYPE)
        began = time.perf_counter()
        for hidden in hidden_T11H:
            self.blocks.token(hidden, self.cache, self.position)
            self.position += 1
        return time.perf_counter() - began


def new_span(shape: MoeShape, trace_TBK: Trace) -> Span:
    return Span(MoeBlocks(shape, trace_TBK, DTYPE), shape.hidden)


@dataclass
class Result:
    """What was measured.

    Attributes:
        room: bytes that programs could still get while the ballast was there: the most that the page cache held.
        least: bytes that the best possible cache of as many slots would have read.
        policies: bytes that rules for staying would have read, by name.
        kept: share of a token's experts that the token before it needed too.
    """

    flash: Span
    mapped: Span
    pool: ExpertPool
    room: int
    least: int
    policies: dict[str, int]
    kept: float


def measure(folder: Path, count: int, rounds: int, squeeze: bool) -> Result:
    """Measure both spans, which take turns."""
    trace = load_trace()[:, :count]
    flash, mapped = new_span(QWEN3, trace), new_span(QWEN3, trace)
    layout = flash.blocks.layout
    paths = write_files(folder, layout, count)
    budget = int(RESIDENT_SHARE * count * layout.file_bytes)
    pool = flash.blocks.attach_flash([FlashStore.open(path, layout) for path in paths], budget)
    mapped.blocks.attach_mapped(paths)
    flash.seconds(WARM_UP_TOKENS)

    def take_turns() -> None:
        for _ in range(rounds):
            flash.rates.append(FLASH_TOKENS / flash.seconds(FLASH_TOKENS))
            mapped.rates.append(MAPPED_TOKENS / mapped.seconds(MAPPED_TOKENS))

    room = available_bytes()
    if squeeze:
        with Ballast(max(MIN_AVAILABLE_BYTES, budget)):
            mapped.seconds(WARM_UP_TOKENS // 2)
            room = available_bytes()
            take_turns()
    else:
        take_turns()
    trace, slots = trace[: flash.position], pool.cache.slots
    rules = {
        "least recently used": LeastRecentlyUsed,
        "decayed frequency, as served": DecayedFrequency,
    }
    policies = {
        name: int(reads(trace, slots, rule(count, layout.count)).sum()) * layout.stride for name, rule in rules.items()
    }
    least = int(fewest_reads(trace, slots).sum()) * layout.stride
    return Result(flash, mapped, pool, room, least, policies, overlap(trace))


def report(found: Result) -> str:
    """Format the table, and what was read against what had to be."""
    flash, mapped, pool = found.flash, found.mapped, found.pool
    size, tokens = pool.bytes_read, flash.position
    hits = pool.counters.hits / (pool.counters.hits + pool.counters.misses)
    rows = [
        [
            f"flash, {RESIDENT_SHARE:.0%} in memory",
            spread(flash.rates),
            times(flash.rates, mapped.rates),
            f"{size / tokens / 1e9:.2f}",
            f"{hits:.2f}",
        ],
        [f"mmap, page cache up to {found.room / 1e9:.1f} GB", spread(mapped.rates), "1", "", ""],
    ]
    read = ", ".join(f"{name} {size / found.least:.2f}" for name, size in found.policies.items())
    return table(HEADING, rows) + (
        f"\n\nBytes read over {tokens} tokens, of what the best possible cache would have read: "
        f"{pool.bytes_read / found.least:.2f}; rules alone: {read}. "
        f"Experts that the token before needed too: {found.kept:.0%}."
    )
