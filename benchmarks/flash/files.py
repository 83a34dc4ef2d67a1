"""Packed files of random weights in the shapes of real models, for the benchmarks of weights on flash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swarm.models.flash.records import RecordLayout

CHUNK_VALUES = 1 << 24
"""Random values that are drawn once; a file repeats them, each time from another place on."""

SCALE = 0.02
"""Standard deviation of the weights, as models of these families are initialized."""


PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class OptShape:
    """The matrices of a block of OPT, by their names in it, and how they are cut into records."""

    hidden: int = 4096
    neurons: int = 16384
    heads: int = 32
    layers: int = 32

    @property
    def attention(self) -> Mapping[str, tuple[int, ...]]:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        return {f"self_attn.{name}.weight": (self.hidden, self.hidden) for name in names}

    @property
    def feed_forward(self) -> Mapping[str, tuple[int, ...]]:
        return {"fc1.weight": (self.neurons, self.hidden), "fc2.weight": (self.hidden, self.neurons)}

    def whole(self, dtype: torch.dtype) -> RecordLayout:
        """The block in one piece, as it is read without any knowledge of neurons."""
        shapes = {**self.attention, **self.feed_forward}
        return RecordLayout.of(shapes, dict.fromkeys(shapes, None), dtype)

    def pieces(self, dtype: torch.dtype) -> RecordLayout:
        """The block in pieces of a megabyte, for reading a part of it."""
        values = sum(math.prod(shape) for shape in (*self.attention.values(), *self.feed_forward.values()))
        each = PIECE_BYTES // dtype.itemsize
        return RecordLayout.of({"pieces": (values // each, each)}, {"pieces": 0}, dtype)

    def bundled(self, dtype: torch.dtype) -> RecordLayout:
        """A neuron is its row of fc1 and its column of fc2."""
        return RecordLayout.of(self.feed_forward, {"fc1.weight": 0, "fc2.weight": 1}, dtype)

    def apart(self, dtype: torch.dtype) -> tuple[RecordLayout, RecordLayout]:
        """Rows of fc1 in one place, columns of fc2 in another."""
        return (
            RecordLayout.of(self.feed_forward, {"fc1.weight": 0}, dtype),
            RecordLayout.of(self.feed_forward, {"fc2.weight": 1}, dtype),
        )


OPT = OptShape()
"""OPT-6.7B."""


def write_random(path: Path, layout: RecordLayout, seed: int) -> Path:
    """Write a file with `layout.count` records of random weights; padding is random too."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(CHUNK_VALUES, generator=generator) * SCALE).to(layout.dtype)
    data = values.view(torch.uint8).numpy()
    starts = np.random.default_rng(seed)
    left = layout.file_bytes
    with path.open("wb") as file:
        while left:
            start = int(starts.integers(len(values))) * layout.dtype.itemsize
            piece = data[start : start + min(left, len(data) - start)]
            file.write(piece)
            left -= len(piece)
        file.flush()
    return path
