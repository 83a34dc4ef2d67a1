"""The adapters of one forward: which tokens have which adapter, and what the current thread runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarm.models.adapters.block_adapter import BlockAdapterWeights

AdapterWeights = Mapping[int, BlockAdapterWeights]
"""A client's adapter: the weights that it adds to each block, by the block's number in the whole model."""

NO_ADAPTER: AdapterWeights = {}


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Consecutive tokens of a forward that have the same adapter: the tokens of one request.

    Attributes:
        weights: the adapter.
        positions: each token's position in its sequence, as the model counts positions; negative for padding.
    """

    weights: AdapterWeights
    positions: Sequence[int]


@dataclass(eq=False)
class AdapterBatch:
    """The adapters of all tokens in one forward, with the token indices that the hooks need.

    Attributes:
        segments: together they cover all tokens, in order.
    """

    segments: Sequence[AdapterSegment]
    _indices: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _prompted: dict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor] | None] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens in the forward."""
        return sum(len(segment.positions) for segment in self.segments)

    def weights_of(self, block: int) -> list[tuple[BlockAdapterWeights, tuple[int, ...]]]:
        """The different adapter weights of a block, each with the numbers of the segments that have it."""
        found: dict[int, tuple[BlockAdapterWeights, tuple[int, ...]]] = {}
        for number, segment in enumerate(self.segments):
            weights = segment.weights.get(block)
            if weights is not None:
                _, before = found.get(id(weights), (weights, ()))
                found[id(weights)] = weights, (*before, number)
        return list(found.values())

    def token_index(self, numbers: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """Indices of the tokens in the segments with these numbers; None if they hold all tokens."""
        if len(numbers) == len(self.segments):
            return None
        if numbers not in self._indices:
            tokens = [token for token, number in enumerate(self._segment_of_token()) if number in numbers]
            self._indices[numbers] = torch.tensor(tokens, dtype=torch.int64, device=device)
        return self._indices[numbers]

    def prompt_index(
        self, numbers: tuple[int, ...], length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tokens of these segments that a soft prompt of `length` positions is added to.

        Returns:
            indices of the tokens, and the prompt position that is added to each of them; None if there are no tokens.
        """
        key = numbers, length
        if key not in self._prompted:
            positions = [position for segment in self.segments for position in segment.positions]
            pairs = [
                (token, position)
                for token, (position, number) in enumerate(zip(positions, self._segment_of_token(), strict=True))
                if 0 <= position < length and number in numbers
            ]
            both = torch.tensor(pairs, device=device).unbind(1) if pairs else None
            self._prompted[key] = (both[0], both[1]) if both is not None else None
        return self._prompted[key]

    def _segment_of_token(self) -> list[int]:
        """The number of each token's segment."""
        return [number for number, segment in enumerate(self.segments) for _ in segment.positions]


_active = threading.local()


def active_adapters() -> AdapterBatch | None:
    """The adapters that are active in this thread, or None."""
    return getattr(_active, "adapters", None)


class ActiveAdapters:
    """Context manager that makes adapters active in this thread: the layers that run inside it add them.

    Args:
        adapters: None to run the layers without adapters.
    """

    def __init__(self, adapters: AdapterBatch | None) -> None:
        self._adapters = adapters

    def __enter__(self) -> None:
        self._before = active_adapters()
        _active.adapters = self._adapters

    def __exit__(self, *error: object) -> None:
        _active.adapters = self._before
