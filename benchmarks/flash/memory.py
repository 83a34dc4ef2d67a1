"""Resident memory of blocks of OPT-6.7B on flash, over as many tokens as they compute in an hour.

Run in a process of its own, so that nothing else counts: `python -m benchmarks.flash.memory FOLDER DTYPE BLOCKS TOKENS`
prints its `Resident` as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.flash.files import OPT
from benchmarks.flash.opt import attention_block, open_files, sparse_blocks
from benchmarks.flash.planted import PAPER, PlantedNeurons
from benchmarks.flash.setting import TINY, half_the_memory, slots_for, tiny_blocks
from benchmarks.flash.steps import plain, seconds_a_token
from swarm.models.flash.neurons.sparse_feed_forward import SparseOptions
from swarm.models.loading.span_loading import return_freed_memory

TEXT_TOKENS = 256
"""Tokens of one text, as in the paper; its keys and values are dropped with it."""

SAMPLE_S = 0.1
LIMIT_BYTES = 150_000_000
"""What may be resident beyond the budget."""


@dataclass
class Resident:
    """Bytes.

    Attributes:
        before: resident before the blocks were made: Python, libraries, and what a first product takes.
        budget: for all weights of the blocks.
        seconds, resident: samples.
        tokens: computed in that time.
        token_s: seconds a token of all 32 blocks.
    """

    before: int
    budget: int
    tokens: int = 0
    token_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def beyond(self) -> int:
        """The most that was resident, without the budget and what was there before."""
        return max(self.resident) - self.before - self.budget


def measure(folder: Path, dtype: torch.dtype, blocks: int, tokens: int) -> Resident:
    """Measure in a process of its own."""
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "benchmarks.flash.memory", str(folder), name, str(blocks), str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Resident(**json.loads(done.stdout))


def report(found: Resident) -> str:
    """One line."""
    return (
        f"{found.tokens} tokens (an hour is {3600 / found.token_s:.0f}): {found.budget / 1e6:.0f} MB of budget, "
        f"{found.before / 1e6:.0f} MB before, {max(found.resident) / 1e6:.0f} MB resident at most: "
        f"{found.beyond / 1e6:.0f} MB beyond the budget, of {LIMIT_BYTES / 1e6:.0f} allowed"
    )


def _measured(folder: Path, dtype: torch.dtype, blocks: int, tokens: int) -> Resident:
    planted = PlantedNeurons.like(PAPER)
    seconds_a_token([plain(one) for one in tiny_blocks(dtype, planted)], 4, 1, dtype, TINY)  # loads what products need
    return_freed_memory()
    budget = half_the_memory(dtype, blocks)
    found = Resident(psutil.Process().memory_info().rss, budget)
    files = open_files(folder, dtype, blocks, planted)
    attention = [attention_block(number, dtype) for number in range(blocks)]
    options = SparseOptions(slots_for(budget, blocks, dtype))
    sparse = sparse_blocks(attention, [one.planted for one in files], [one.bundled for one in files], options)
    steps = [plain(block) for block in sparse.blocks]
    return_freed_memory()  # as servers do when their blocks are loaded
    taken = 0.0
    with _sampled(found):
        while found.tokens < tokens:
            count = min(TEXT_TOKENS, tokens - found.tokens)
            sparse.draw(count)
            taken += count * seconds_a_token(steps, count, 1, dtype)
            found.tokens += count
    found.token_s = taken / tokens * OPT.layers / blocks
    return found


@contextmanager
def _sampled(found: Resident) -> Iterator[None]:
    process, closing, began = psutil.Process(), threading.Event(), time.perf_counter()

    def sample() -> None:
        while not closing.wait(SAMPLE_S):
            found.seconds.append(round(time.perf_counter() - began, 2))
            found.resident.append(process.memory_info().rss)

    thread = threading.Thread(target=sample, name="memory sampler")
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def main() -> None:
    torch.set_num_threads(1)
    folder, name, blocks, tokens = sys.argv[1:]
    print(json.dumps(asdict(_measured(Path(folder), getattr(torch, name), int(blocks), int(tokens)))))


if __name__ == "__main__":
    main()
