"""Whose turn it is among keys that wait (pure)."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Who is next: the keys take turns, and each key's own requests go in the order in which they came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str | None, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def waiting(self, name: str | None) -> int:
        """How many of this key wait."""
        return len(self._queues.get(name, ()))

    def push(self, name: str | None, one: T) -> None:
        """Let it wait behind the others of its key. A key that did not wait comes behind all keys that do."""
        self._queues.setdefault(name, deque()).append(one)
        self._count += 1

    def first(self) -> T:
        """Whose turn is next."""
        return next(iter(self._queues.values()))[0]

    def pop(self) -> T:
        """Whose turn it is; the key goes behind the others."""
        name = next(iter(self._queues))
        one = self._queues[name].popleft()
        self._queues.move_to_end(name)
        self._left(name)
        return one

    def remove(self, name: str | None, one: T) -> None:
        """It waits no longer. Nothing happens if it did not wait."""
        if one in self._queues.get(name, ()):
            self._queues[name].remove(one)
            self._left(name)

    def greediest(self) -> str | None:
        """The key that waits most often."""
        return max(self._queues, key=lambda name: len(self._queues[name]))

    def pop_newest(self, name: str | None) -> T:
        """The last of this key's requests, which gives way."""
        one = self._queues[name].pop()
        self._left(name)
        return one

    def _left(self, name: str | None) -> None:
        self._count -= 1
        if not self._queues[name]:
            del self._queues[name]
