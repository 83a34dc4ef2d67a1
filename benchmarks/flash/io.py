"""Table 2 of "LLM in a flash": what a token reads, how fast, and for how long, as one method is added to another.

Shapes of OPT-6.7B. A few of its layers are on the drive; figures are for all 32. The embeddings are left out, since in
a swarm they are the client's: the paper's first rows have 0.4 GB of them. Nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.tables import quotients, spread, table, times
from benchmarks.flash.files import OPT, write_random
from benchmarks.flash.planted import Measured, PlantedLayer, PlantedNeurons
from swarm.models.flash.reading import FlashStore
from swarm.models.flash.records import Indices, RecordBuffer

WHOLE_TOKENS, SPARSE_TOKENS = 1, 16
"""Tokens of a round: those that read whole layers, and those that read neurons."""

HEADING = (
    "reads",
    "GB a token",
    "GB/s",
    "ms a token",
    "ms of CPU",
    "times less than naive",
    "paper: GB",
    "GB/s",
    "ms",
)
PAPER = {
    "naive": ("13.4", "6.10", "2196"),
    "hybrid": ("6.7", "6.10", "1090"),
    "+ predictor": ("0.9", "1.25", "738"),
    "+ window": ("0.2", "1.25", "164"),
    "+ bundles": ("0.2", "2.25", "87"),
}


@dataclass
class LayerFiles:
    """The stores of one layer on the drive.

    Attributes:
        whole: every matrix, cut into pieces of one read.
        apart: rows of fc1 and columns of fc2, in two places.
        bundled: both side by side.
        planted: the neurons that its tokens need.
    """

    whole: FlashStore
    apart: tuple[FlashStore, FlashStore]
    bundled: FlashStore
    planted: PlantedLayer

    def close(self) -> None:
        for store in (self.whole, *self.apart, self.bundled):
            store.close()


Request = tuple[FlashStore, Indices]


@dataclass
class Method:
    """A row of the table.

    Attributes:
        requests: what a token reads of a layer.
        tokens: in a round.
        seconds: a token, all 32 layers, by round.
        cpu_seconds: user and system time of all threads, likewise.
        bytes: likewise.
    """

    name: str
    requests: Callable[[LayerFiles, int], list[Request]]
    tokens: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)


def methods(window: int) -> list[Method]:
    """The rows of the table, in order."""

    def every(store: FlashStore, share: float = 1.0) -> Indices:
        return np.arange(round(store.layout.count * share))

    def new(layer: LayerFiles, token: int) -> Indices:
        before = np.concatenate([layer.planted.selected(earlier) for earlier in range(token - window, token)])
        return np.setdiff1d(layer.planted.selected(token), before)

    return [
        Method("naive", lambda layer, token: [(layer.whole, every(layer.whole))], WHOLE_TOKENS),
        Method("hybrid", lambda layer, token: [(layer.whole, every(layer.whole, 0.5))], WHOLE_TOKENS),
        Method(
            "+ predictor",
            lambda layer, token: [(store, layer.planted.selected(token)) for store in layer.apart],
            SPARSE_TOKENS,
        ),
        Method("+ window", lambda layer, token: [(store, new(layer, token)) for store in layer.apart], SPARSE_TOKENS),
        Method("+ bundles", lambda layer, token: [(layer.bundled, new(layer, token))], SPARSE_TOKENS),
    ]


def open_layers(folder: Path, dtype: torch.dtype, count: int, planted: PlantedNeurons) -> list[LayerFiles]:
    """Write the files of `count` layers, unless they are there, and open them."""
    layers = []
    for number in range(count):
        layouts = {"whole": OPT.pieces(dtype), "bundled": OPT.bundled(dtype)}
        layouts["fc1"], layouts["fc2"] = OPT.apart(dtype)
        stores = {}
        for name, layout in layouts.items():
            path = folder / f"{number}-{name}-{dtype.itemsize}.bin"
            if not path.exists():
                write_random(path, layout, seed=number)
            stores[name] = FlashStore.open(path, layout)
        layer = planted.draw(OPT.neurons, seed=number)
        layers.append(LayerFiles(stores["whole"], (stores["fc1"], stores["fc2"]), stores["bundled"], layer))
    return layers


class Reader:
    """Reads what a token needs into buffers that all layers share."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], RecordBuffer] = {}

    def seconds(self, requests: Sequence[Request]) -> float:
        """Time to read, everything begun together."""
        buffers = [self._buffer(number, store) for number, (store, _) in enumerate(requests)]
        began = time.perf_counter()
        pending = [
            store.read(records, buffer, np.arange(len(records)))
            for (store, records), buffer in zip(requests, buffers, strict=True)
        ]
        for read in pending:
            read.wait()
        return time.perf_counter() - began

    def _buffer(self, number: int, store: FlashStore) -> RecordBuffer:
        key = (number, store.layout.stride)
        if key not in self._buffers:
            self._buffers[key] = RecordBuffer(store.layout, store.layout.count)
        return self._buffers[key]


def measure(rows: Sequence[Method], layers: Sequence[LayerFiles], window: int, rounds: int) -> None:
    """Fill in the rows; all methods take turns in each round."""
    reader, scale = Reader(), OPT.layers / len(layers)
    for turn in range(-1, rounds):
        for row in rows:
            first = window + max(turn, 0) * row.tokens
            seconds = cpu_s = size = 0.0
            for token in range(first, first + row.tokens):
                for layer in layers:
                    requests = row.requests(layer, token)
                    before_s = time.process_time()
                    seconds += reader.seconds(requests)
                    cpu_s += time.process_time() - before_s
                    size += sum(len(records) * store.layout.stride for store, records in requests)
            if turn >= 0:  # the first round touches the buffers' pages
                row.seconds.append(seconds * scale / row.tokens)
                row.bytes.append(size * scale / row.tokens)
                row.cpu_seconds.append(cpu_s * scale / row.tokens)


def report(rows: Sequence[Method]) -> str:
    """Format the table."""
    naive, lines = rows[0].seconds, []
    for row in rows:
        lines.append(
            [
                row.name,
                spread([size / 1e9 for size in row.bytes]),
                spread([speed / 1e9 for speed in quotients(row.bytes, row.seconds)]),
                spread([seconds * 1000 for seconds in row.seconds], 0),
                spread([seconds * 1000 for seconds in row.cpu_seconds], 0),
                times(naive, row.seconds),
                *PAPER[row.name],
            ]
        )
    return table(HEADING, lines)


def run(folder: Path, dtype: torch.dtype, layers: int, like: Measured, rounds: int) -> list[Method]:
    """Measure one table."""
    opened = open_layers(folder, dtype, layers, PlantedNeurons.like(like))
    rows = methods(like.window)
    try:
        measure(rows, opened, like.window, rounds)
    finally:
        for layer in opened:
            layer.close()
    return rows
