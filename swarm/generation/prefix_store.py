"""What a model's texts have left at the swarm's servers, and who may begin with it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from swarm.client.chain.prefix import Prefix
from swarm.common.machine import available_memory

MIN_PREFIX_TOKENS = 32
"""Tokens below which nothing is gained: they are computed in one step."""

MAX_DEFAULT_BYTES = 4 * 2**30
DEFAULT_SHARE = 0.125
"""Of this machine's free memory, for what went into the servers."""

MAX_PREFIXES = 1024


def default_bytes() -> int:
    """What all prefixes of this process may take if nothing else is said: a share of the memory that is free now."""
    return min(MAX_DEFAULT_BYTES, int(available_memory() * DEFAULT_SHARE))


class PrefixStore:
    """The prefixes of one model. Its methods may be called from any thread.

    A prefix is found by its owner only. Otherwise, the time of an answer would tell what others have asked
    (CVE-2025-46570). If memory is short, the owner with the most bytes loses its least recently used prefix.

    Args:
        capacity: bytes of this client's memory that all may take.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._prefixes: list[tuple[str, Prefix]] = []  # the least recently used first
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes that all take."""
        with self._lock:
            return sum(prefix.bytes for _, prefix in self._prefixes)

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, owner: str, tokens: Sequence[int]) -> Prefix | None:
        """The longest prefix of a prompt that the owner has, without the prompt's last token; None if it is short."""
        asked = torch.tensor(tokens[:-1])
        with self._lock:
            lengths = [_common(prefix.tokens, asked) if its == owner else 0 for its, prefix in self._prefixes]
            if max(lengths, default=0) < MIN_PREFIX_TOKENS:
                return None
            best = max(range(len(lengths)), key=lengths.__getitem__)
            self._prefixes.append(self._prefixes.pop(best))
            return self._prefixes[-1][1].first(lengths[best])

    def add(self, owner: str, prefix: Prefix) -> None:
        """Keep a prefix for its owner. Those that are contained in it are not kept any more."""
        size, tokens = prefix.bytes, prefix.tokens
        if len(prefix) < MIN_PREFIX_TOKENS or size > self.capacity:
            return
        with self._lock:
            self._prefixes = [
                (its, other)
                for its, other in self._prefixes
                if its != owner or _common(other.tokens, tokens) < len(other)
            ]
            self._prefixes.append((owner, prefix))
            make_room(self._prefixes, self.capacity, MAX_PREFIXES)


class HasBytes(Protocol):
    """Something that takes memory."""

    @property
    def bytes(self) -> int:
        """How much."""


T = TypeVar("T", bound=HasBytes)


def make_room(kept: list[tuple[str, T]], capacity: int, count: int) -> None:
    """Give up what is first in the list, of the owner with the most bytes, until the rest is within the limits.

    Args:
        kept: by owner, the least recently used first.
        capacity: bytes that all may take.
        count: how many there may be.
    """
    held = Counter[str]()
    for owner, one in kept:
        held[owner] += one.bytes
    while held.total() > capacity or len(kept) > count:
        most = max(held, key=held.__getitem__)
        first = next(place for place, (owner, _) in enumerate(kept) if owner == most)
        held[most] -= kept.pop(first)[1].bytes


def _common(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = min(len(first), len(second))
    differ = (first[:length] != second[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
