"""Whose turn it is to ask the servers for room, among the texts of one model.

A server gives each peer a part of its cache, and all texts of a gateway are one peer's. A text asks for room for its
next portion only. If the queue is empty, it asks at once. If the servers are full, it holds no room while it queues:

- Owners take turns: an owner with many waiting texts does not delay those of others.
- Each owner's texts are served in the order in which they began, so a text between two portions precedes newer ones.
- Only the text whose turn it is asks, so two texts never hold a part of what both need.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class RoomPlace:
    """A text that waits.

    Attributes:
        number: of the text, in the order in which they began.
        turn: done when the text may ask. Cancelling it is allowed.
    """

    owner: str
    number: int
    turn: Future[None] = field(default_factory=Future)


class RoomQueue:
    """The texts of one model that wait for room at its servers. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[RoomPlace] = []
        self._asking: RoomPlace | None = None
        self._last_turns: dict[str, int] = {}
        self._holding = 0

    def next_number(self) -> int:
        """The number of a text that begins now."""
        return next(self._numbers)

    @property
    def is_empty(self) -> bool:
        """Whether no text waits or asks, so that another may ask at once."""
        return self._asking is None

    @property
    def holding(self) -> int:
        """How many texts have room, which they will give back."""
        return self._holding

    def note_held(self, more: int) -> None:
        """So many texts more, or less, have room."""
        with self._lock:
            self._holding += more

    @contextmanager
    def place(self, owner: str, number: int) -> Iterator[RoomPlace]:
        """A place in the queue, until the end of the context. Inside, wait for `turn` and then ask for room."""
        place = RoomPlace(owner, number)
        with self._lock:
            self._waiting.append(place)
        self._advance(None)
        try:
            yield place
        finally:
            self._advance(place)

    def _advance(self, leaving: RoomPlace | None) -> None:
        """Pass the turn on to the next text, if it is free or `leaving` had it."""
        with self._lock:
            if leaving in self._waiting:
                self._waiting.remove(leaving)
            if self._asking is not leaving:
                return
            self._asking = next_place(self._waiting, self._last_turns)
            if (asking := self._asking) is None:
                self._last_turns.clear()
                return
            self._waiting.remove(asking)
            self._last_turns[asking.owner] = max(self._last_turns.values(), default=0) + 1
        if asking.turn.set_running_or_notify_cancel():
            asking.turn.set_result(None)


def next_place(waiting: list[RoomPlace], last_turns: dict[str, int]) -> RoomPlace | None:
    """Whose turn it is: the oldest text of the owner whose last turn is longest ago. Pure.

    Args:
        last_turns: when owners had their last turns, as ascending numbers.
    """
    return min(waiting, key=lambda place: (last_turns.get(place.owner, 0), place.number), default=None)
