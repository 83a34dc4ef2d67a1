"""Spans and rates of many servers as arrays, changed one server at a time."""

from __future__ import annotations

import numpy as np

from swarm.data_structures import Span
from swarm.server.placement.move_search import Flags, Floats, Ints


class ServerTable:
    """One row a server, in the order in which the servers came. Servers are known by their row's number."""

    def __init__(self) -> None:
        self._starts = np.zeros(64, dtype=np.int64)
        self._ends = np.zeros(64, dtype=np.int64)
        self._rates = np.zeros(64)
        self._flags = np.zeros(64, dtype=np.bool_)
        self._marks = np.zeros(64, dtype=np.int64)
        self._present = np.zeros(64, dtype=np.bool_)

    def put(self, row: int, span: Span, rate: float, flag: bool, mark: int = 0) -> None:
        """Set what is known of a server: its blocks, the tokens/s that it adds to each, two marks of the caller's."""
        while row >= len(self._starts):
            self._grow()
        self._starts[row], self._ends[row], self._rates[row], self._flags[row] = span.start, span.end, rate, flag
        self._marks[row], self._present[row] = mark, True

    def remove(self, row: int) -> None:
        """Forget a server."""
        if row < len(self._present):
            self._present[row] = False

    @property
    def rows(self) -> Ints:
        """The servers that are known, ascending."""
        return np.flatnonzero(self._present)

    def columns(self) -> tuple[Ints, Ints, Floats, Flags, Ints]:
        """First block, block behind the last, rate, flag and mark of the known servers, in the order of `rows`."""
        rows = self.rows
        return self._starts[rows], self._ends[rows], self._rates[rows], self._flags[rows], self._marks[rows]

    def _grow(self) -> None:
        for name in ("_starts", "_ends", "_rates", "_flags", "_marks", "_present"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
