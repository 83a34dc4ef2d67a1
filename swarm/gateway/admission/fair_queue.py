"""A queue in which API keys take turns (pure)."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over the keys; the items of one key stay in the order in which they came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str | None, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, key_name: str | None) -> int:
        """How many items of this key wait."""
        return len(self._queues.get(key_name, ()))

    def push(self, key_name: str | None, item: T) -> None:
        """Add an item behind the others of its key. A key without items comes behind all keys that have some."""
        self._queues.setdefault(key_name, deque()).append(item)
        self._count += 1

    def first(self) -> T:
        """The item whose turn is next."""
        return next(iter(self._queues.values()))[0]

    def pop(self) -> T:
        """Remove and return the item whose turn is next; its key goes behind the others."""
        key_name = next(iter(self._queues))
        item = self._queues[key_name].popleft()
        self._queues.move_to_end(key_name)
        self._item_left(key_name)
        return item

    def remove(self, key_name: str | None, item: T) -> None:
        """Remove an item. Does nothing if it is not in the queue."""
        if item in self._queues.get(key_name, ()):
            self._queues[key_name].remove(item)
            self._item_left(key_name)

    def longest_key(self) -> str | None:
        """The key with the most items."""
        return max(self._queues, key=lambda key_name: len(self._queues[key_name]))

    def pop_newest(self, key_name: str | None) -> T:
        """Remove and return this key's last item."""
        item = self._queues[key_name].pop()
        self._item_left(key_name)
        return item

    def _item_left(self, key_name: str | None) -> None:
        self._count -= 1
        if not self._queues[key_name]:
            del self._queues[key_name]
