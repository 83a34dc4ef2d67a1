"""The attention caches of a server's sessions, read where they are: in the server's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.models.execution.contiguous_sequences import ContiguousSequences
from swarm.models.execution.padded_sequences import PaddedSequences


@dataclass(frozen=True)
class CachedSession:
    """What a server holds of one session.

    Attributes:
        span: the session's blocks.
        lengths: positions of each sequence.
        layers: of each block, the keys and values of each sequence, `[heads, positions, dim]`.
    """

    span: str
    lengths: tuple[int, ...]
    layers: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]


async def read_caches(server: Any) -> list[CachedSession]:
    """The caches of all sessions of a `Server`, none of them in the middle of a step; the oldest first."""
    found = []
    for session in list(server._service.sessions._sessions.values()):
        async with session.lock:
            layers = tuple(map(tuple, _layers(session.cache._storage)))
            found.append(CachedSession(str(session.terms.span), session.cache.lengths, layers))
    return found


def _layers(storage: Any) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    match storage:
        case ContiguousSequences(store=store, lengths=lengths):
            return [
                [(_copy(keys[row, :, :end]), _copy(values[row, :, :end])) for row, end in enumerate(lengths)]
                for _, (keys, values) in sorted(store.layers.items())
            ]
        case PaddedSequences(sequences=sequences):
            return [
                [
                    tuple(
                        _copy(kind[one.index, :, one.pad : one.pad + one.length])
                        for kind in (one.rectangle.layers[number].keys, one.rectangle.layers[number].values)
                    )
                    for one in sequences
                ]
                for number in range(sequences[0].rectangle.first, len(sequences[0].rectangle.layers))
            ]
    raise TypeError(f"no test reads a cache of {type(storage).__name__}")


def _copy(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy().copy()


def largest_difference(found: Sequence[CachedSession], expected: Sequence[CachedSession]) -> float:
    """Of any key or value of the sessions of a route, relative to the largest one of its block.

    Fails the test if they do not have the same blocks and the same lengths.
    """
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        assert (one.span, one.lengths) == (other.span, other.lengths)
        assert len(one.layers) == len(other.layers) > 0
        for layer, other_layer in zip(one.layers, other.layers, strict=True):
            for kind in (0, 1):  # keys, values
                scale = max(float(np.abs(row[kind]).max()) for row in other_layer)
                for row, other_row in zip(layer, other_layer, strict=True):
                    assert row[kind].shape == other_row[kind].shape
                    largest = max(largest, float(np.abs(row[kind] - other_row[kind]).max()) / scale)
    return largest
