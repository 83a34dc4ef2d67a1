"""What an update of the swap-delete matrix costs: "LLM in a flash", section 3.3.

A number of neurons leave, as many others come, at rows resident that differ. Beside it what is saved: a new matrix of
the rows that stay and those that come. Reading is left out, so that memory is what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.common.tables import spread, table
from benchmarks.flash.files import OPT
from swarm.models.flash.neurons.neuron_matrix import NeuronMatrix
from swarm.models.flash.records import FinishedRead, Indices, PendingRead, RecordBuffer, RecordLayout, StoreCounters

ROWS = (1024, 2048, 4096, 8192, 15872)
CHANGES = 512
"""Neurons that leave, and that come: somewhat more than the 2.4 % of OPT's."""

HEADING = ("rows in memory", "update, ms", "copying all rows instead, ms")


class NothingStore:
    """A store whose reads take no time and bring nothing."""

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self.counters = StoreCounters()

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        return FinishedRead()

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Row:
    """Milliseconds of updates, by round."""

    rows: int
    update: list[float] = field(default_factory=list)
    rebuild: list[float] = field(default_factory=list)


def measure(dtype: torch.dtype, rounds: int, sizes: Sequence[int] = ROWS, changes: int = CHANGES) -> list[Row]:
    """Time updates; all sizes take turns in one matrix of one layer."""
    layout = OPT.bundled(dtype)
    store, generator = NothingStore(layout), np.random.default_rng(0)
    matrix = NeuronMatrix(layout, layout.count, {"fc1.bias": torch.zeros(layout.count)})
    matrix.buffer.data.zero_()  # touches every page
    found = [Row(size) for size in sizes]
    for turn in range(-1, rounds):
        for row in found:
            matrix.delete(matrix.neurons.copy())
            order = generator.permutation(layout.count)
            matrix.append(order[: row.rows], store).wait()
            leave, come = generator.permutation(order[: row.rows])[:changes], np.sort(order[row.rows :][:changes])
            began = time.perf_counter()
            matrix.delete(leave)
            matrix.append(come, store).wait()
            updated = time.perf_counter()
            kept = matrix.buffer.data[: row.rows - changes]
            copy = torch.cat((kept, matrix.buffer.data[row.rows - changes : row.rows]))
            rebuilt = time.perf_counter()
            del copy
            if turn >= 0:
                row.update.append((updated - began) * 1000)
                row.rebuild.append((rebuilt - updated) * 1000)
    return found


def report(rows: Sequence[Row]) -> str:
    """Format the table."""
    return table(HEADING, [[str(row.rows), spread(row.update), spread(row.rebuild, 1)] for row in rows])
