"""How many tokens of an answer left early, by the block in front of which they did, and how many of them stood."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swarm.client.routes.events import ExitTaken, ExitVerified


@dataclass
class _BoundaryCounts:
    """Guesses in front of one block, and how many of them stood or were given up."""

    taken: int = 0
    stood: int = 0
    given_up: int = 0


@dataclass
class ExitCounts:
    """Counts of one sequence's exits. One thread counts; others may read."""

    _boundaries: dict[int, _BoundaryCounts] = field(default_factory=dict)

    def count(self, event: ExitTaken | ExitVerified) -> None:
        """Count one event of the sequence's session."""
        counts = self._boundaries.setdefault(event.block, _BoundaryCounts())
        if isinstance(event, ExitTaken):
            counts.taken += 1
        elif event.stands:
            counts.stood += 1
        else:
            counts.given_up += 1

    @classmethod
    def total(cls, parts: Iterable[ExitCounts]) -> ExitCounts:
        """The counts of several sequences together."""
        total = cls()
        for part in parts:
            for block, counts in list(part._boundaries.items()):
                sums = total._boundaries.setdefault(block, _BoundaryCounts())
                sums.taken += counts.taken
                sums.stood += counts.stood
                sums.given_up += counts.given_up
        return total

    def details(self) -> list[dict[str, Any]]:
        """The counts as JSON, by block."""
        return [
            {"block": block, "taken": counts.taken, "stood": counts.stood, "given_up": counts.given_up}
            for block, counts in sorted(self._boundaries.items())
        ]
