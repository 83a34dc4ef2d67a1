"""Spans and rates of many servers as numpy arrays, updated one server at a time."""

from __future__ import annotations

import numpy as np

from swarm.data_structures import Span
from swarm.server.placement.best_move import Flags, Floats, Ints


class ServerTable:
    """One row per server, in the order in which the servers joined. A server is identified by its row number."""

    def __init__(self) -> None:
        self._starts = np.zeros(64, dtype=np.int64)
        self._ends = np.zeros(64, dtype=np.int64)
        self._rates = np.zeros(64)
        self._flags = np.zeros(64, dtype=np.bool_)
        self._marks = np.zeros(64, dtype=np.int64)
        self._present = np.zeros(64, dtype=np.bool_)

    def set_server(self, row: int, span: Span, rate: float, flag: bool, mark: int = 0) -> None:
        """Set a server's blocks, the tokens/s that it adds to each, and two values for the caller's own use."""
        while row >= len(self._starts):
            self._grow()
        self._starts[row], self._ends[row], self._rates[row], self._flags[row] = span.start, span.end, rate, flag
        self._marks[row], self._present[row] = mark, True

    def remove(self, row: int) -> None:
        """Remove a server."""
        if row < len(self._present):
            self._present[row] = False

    @property
    def rows(self) -> Ints:
        """Row numbers of the servers in the table, ascending."""
        return np.flatnonzero(self._present)

    def columns(self) -> tuple[Ints, Ints, Floats, Flags, Ints]:
        """First block, block after the last, rate, flag and mark of the servers, in the order of `rows`."""
        rows = self.rows
        return self._starts[rows], self._ends[rows], self._rates[rows], self._flags[rows], self._marks[rows]

    def _grow(self) -> None:
        for name in ("_starts", "_ends", "_rates", "_flags", "_marks", "_present"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
