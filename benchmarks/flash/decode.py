"""Table 3 of "LLM in a flash": seconds a token, end to end, of blocks of OPT-6.7B at half the memory on a CPU.

transformers' own decoder layers, attention over a growing cache included. Figures of a few blocks, for all 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from benchmarks.common.tables import spread, table, times
from benchmarks.flash.files import OPT
from benchmarks.flash.opt import OptFiles, SparseBlocks, bound_block, dense_block, in_memory, open_files, sparse_blocks
from benchmarks.flash.setting import BATCHES, Setting, batch_name, neuron_slots
from benchmarks.flash.steps import Step, plain, seconds_a_token
from swarm.models.flash.neurons.sparse_feed_forward import SparseOptions
from swarm.models.flash.records import PendingRead, RecordBuffer, StoreCounters, WeightStore

WHOLE_TOKENS, SPARSE_TOKENS, DENSE_TOKENS = 1, 24, 4
"""Tokens of a round."""

WARM_UP_TOKENS = 16
"""Tokens before a round of sparse ones, in which the window fills."""

ONE = np.zeros(1, dtype=np.int64)

PAPER = {
    "naive": "2196 + 986 = 3182",
    "hybrid": "not given (Falcon: 1147 + 800 = 1947)",
    "flash": "105 + 58 + 506 = 669",
}
HEADING = (
    "blocks",
    "ms a token",
    "of it waiting for the drive",
    "GB a token",
    "times as quick as naive",
    "as hybrid",
    "as the same in memory",
    "paper, ms",
)


Opened = Callable[[], AbstractContextManager[Sequence[Step]]]
"""Blocks in order, ready to compute."""


@dataclass
class Variant:
    """A row of the table.

    Attributes:
        name: of the row.
        tokens: in a round.
        opened: yields the blocks in order, and the counters of their stores.
        prepare: draws the neurons of so many tokens before they are timed.
        batch: sequences that are computed together.
        seconds, waiting, bytes: a token, all 32 blocks, by round.
    """

    name: str
    tokens: int
    opened: Opened
    counters: Sequence[StoreCounters]
    prepare: Callable[[int], None] = lambda tokens: None
    batch: int = 1
    seconds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)


def read_first(block: Any, files: OptFiles, buffer: RecordBuffer) -> Step:
    """A block that is read whole before it computes."""

    def step(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        files.whole.read(ONE, buffer, ONE).wait()
        result: torch.Tensor = block(hidden, past_key_values=cache)
        return result

    return step


class ReadAhead:
    """Blocks that are read whole, each while the one before computes. Their number is even.

    Args:
        buffers: two, which take turns.
    """

    def __init__(self, files: Sequence[OptFiles], buffers: Sequence[RecordBuffer]) -> None:
        self._files, self._buffers = files, buffers
        self._next = 0
        self._pending = self._begin()

    def _begin(self) -> PendingRead:
        number, self._next = self._next, (self._next + 1) % len(self._files)
        return self._files[number].whole.read(ONE, self._buffers[number % 2], ONE)

    def finish(self) -> None:
        """Wait for the read that nothing will compute with."""
        self._pending.wait()

    def step(self, block: Any) -> Step:
        """A block, the next one of those that are read."""

        def run(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
            self._pending.wait()
            self._pending = self._begin()
            result: torch.Tensor = block(hidden, past_key_values=cache)
            return result

        return run


def read_ahead(files: Sequence[OptFiles], buffers: Sequence[RecordBuffer], dense: Mapping[int, Any]) -> Opened:
    """Blocks of which some are in memory (`dense`, by number), and the others are read ahead."""
    read = [number for number in range(len(files)) if number not in dense]
    blocks = {number: bound_block(number, buffers[place % 2]) for place, number in enumerate(read)}

    @contextmanager
    def opened() -> Iterator[Sequence[Step]]:
        ahead = ReadAhead([files[number] for number in read], buffers)
        yield [plain(dense[number]) if number in dense else ahead.step(blocks[number]) for number in range(len(files))]
        ahead.finish()

    return opened


def measure(variants: Sequence[Variant], setting: Setting, rounds: int) -> None:
    """Fill in the rows; all take turns in each round."""
    dtype, scale = setting.dtype, OPT.layers / setting.layers
    for _ in range(rounds):
        for variant in variants:
            warm_up = min(WARM_UP_TOKENS, variant.tokens)
            variant.prepare((warm_up + variant.tokens) * variant.batch)
            with variant.opened() as blocks:
                seconds_a_token(blocks, warm_up, variant.batch, dtype)
                before = [replace(one) for one in variant.counters]
                seconds = seconds_a_token(blocks, variant.tokens, variant.batch, dtype)
            changes = list(zip(variant.counters, before, strict=True))
            per_token = scale / (variant.tokens * variant.batch)
            variant.seconds.append(scale * seconds / variant.batch)
            variant.waiting.append(per_token * sum(now.wait_seconds - then.wait_seconds for now, then in changes))
            variant.bytes.append(per_token * sum(now.bytes - then.bytes for now, then in changes))


def report(variants: Sequence[Variant]) -> str:
    """Format the table."""
    by_name = {one.name: one.seconds for one in variants}
    lines = []
    for one in variants:
        lines.append(
            [
                one.name,
                spread([seconds * 1000 for seconds in one.seconds], 0),
                spread([seconds * 1000 for seconds in one.waiting], 0),
                spread([size / 1e9 for size in one.bytes]),
                *(times(by_name[other], one.seconds) for other in ("naive", "hybrid", "the same in memory")),
                PAPER.get(one.name, ""),
            ]
        )
    return table(HEADING, lines)


def variants(setting: Setting) -> list[Variant]:
    """The rows of the table."""
    dtype, count = setting.dtype, setting.layers
    files = open_files(setting.folder, dtype, count, setting.planted)
    dense = [dense_block(number, one, setting.planted.active) for number, one in enumerate(files)]
    half = {number: dense[number] for number in range(count // 2)}
    buffers = [RecordBuffer(OPT.whole(dtype), 1) for _ in range(2)]
    naive = [read_first(bound_block(number, buffers[0]), one, buffers[0]) for number, one in enumerate(files)]
    hybrid = [plain(half[number]) if number in half else naive[number] for number in range(count)]
    options = SparseOptions(neuron_slots(setting))
    planted = [one.planted for one in files]
    memory = [in_memory(one) for one in files]
    bundled = [one.bundled for one in files]
    flash = sparse_blocks(dense, planted, bundled, options)
    same = sparse_blocks(dense, planted, memory, options)
    whole = [one.whole.counters for one in files]

    def row(name: str, tokens: int, opened: Opened, counters: Sequence[StoreCounters] = ()) -> Variant:
        return Variant(name, tokens, opened, counters)

    def sparse(name: str, blocks: SparseBlocks, stores: Sequence[WeightStore], batch: int = 1) -> Variant:
        steps, counters = [plain(block) for block in blocks.blocks], [store.counters for store in stores]
        tokens = SPARSE_TOKENS // min(batch, 3)
        return Variant(name, tokens, lambda: nullcontext(steps), counters, blocks.draw, batch)

    return [
        row("naive", WHOLE_TOKENS, lambda: nullcontext(naive), whole),
        row("naive, reading ahead", WHOLE_TOKENS, read_ahead(files, buffers, {}), whole),
        row("hybrid", WHOLE_TOKENS, lambda: nullcontext(hybrid), whole),
        row("hybrid, reading ahead", WHOLE_TOKENS, read_ahead(files, buffers, half), whole),
        sparse("flash", flash, bundled),
        sparse("the same in memory", same, memory),
        row("dense in memory", DENSE_TOKENS, lambda: nullcontext([plain(block) for block in dense])),
        *(sparse(batch_name(batch), flash, bundled, batch) for batch in BATCHES),
    ]
