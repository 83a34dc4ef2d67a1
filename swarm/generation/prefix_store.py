"""What a model's texts have left at the swarm's servers, and who may begin with it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

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

    Only their owner finds them, so that from how long an answer takes no one learns what others have asked
    (CVE-2025-46570). Where memory is short, the owner who holds most gives up what it has used least recently.

    Args:
        capacity: bytes of this client's memory that all may take.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._prefixes: dict[int, tuple[str, Prefix]] = {}  # the least recently used first
        self._next = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes that all take."""
        with self._lock:
            return sum(prefix.bytes for _, prefix in self._prefixes.values())

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, owner: str, tokens: Sequence[int]) -> Prefix | None:
        """The longest prefix of a prompt that the owner has, without the prompt's last token; None if it is short."""
        asked = torch.tensor(tokens[:-1])
        with self._lock:
            lengths = {
                number: _common(prefix.tokens, asked)
                for number, (its_owner, prefix) in self._prefixes.items()
                if its_owner == owner
            }
            best = max(lengths, key=lambda number: lengths[number], default=None)
            if best is None or lengths[best] < MIN_PREFIX_TOKENS:
                return None
            self._prefixes[best] = found = self._prefixes.pop(best)
            return found[1].first(lengths[best])

    def add(self, owner: str, prefix: Prefix) -> None:
        """Keep a prefix for its owner. Those that are contained in it are not kept any more."""
        size, tokens = prefix.bytes, prefix.tokens
        if len(prefix) < MIN_PREFIX_TOKENS or size > self.capacity:
            return
        with self._lock:
            for number, (its_owner, other) in list(self._prefixes.items()):
                if its_owner == owner and _common(other.tokens, tokens) == len(other):
                    del self._prefixes[number]
            self._prefixes[self._next] = owner, prefix
            self._next += 1
            self._make_room()

    def _make_room(self) -> None:
        held = Counter[str]()
        for owner, prefix in self._prefixes.values():
            held[owner] += prefix.bytes
        while held.total() > self.capacity or len(self._prefixes) > MAX_PREFIXES:
            most = max(held, key=lambda owner: held[owner])
            number = next(number for number, (owner, _) in self._prefixes.items() if owner == most)
            held[most] -= self._prefixes.pop(number)[1].bytes


def _common(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = min(len(first), len(second))
    differ = (first[:length] != second[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
