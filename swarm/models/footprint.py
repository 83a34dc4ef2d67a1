"""How much memory a model's blocks take, read off the model built on the meta device: no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Footprint:
    """Attributes:
    weights: bytes that the parameters of each block take.
    cache_per_token: bytes that one position takes in the attention cache of one block.
    """

    weights: tuple[int, ...]
    cache_per_token: int

    def of(self, start: int, end: int, cache_tokens: int) -> int:
        """Bytes for blocks [start, end) with a full cache."""
        return sum(self.weights[start:end]) + (end - start) * cache_tokens * self.cache_per_token


def footprint(checkpoint: Checkpoint, dtype: torch.dtype) -> Footprint:
    """Bytes of each block's weights and of one cached position, in `dtype`. No weights are read."""
    anatomy = checkpoint.anatomy
    weights = tuple(parameters * dtype.itemsize for parameters in anatomy.parameters)
    return Footprint(weights, anatomy.cached_values * dtype.itemsize)
