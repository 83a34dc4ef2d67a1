"""Counting the exits of an answer."""

from __future__ import annotations

from swarm.client.routes.events import ExitTaken, ExitVerified
from swarm.generation.exit_counts import ExitCounts


def counted(*events: ExitTaken | ExitVerified) -> ExitCounts:
    counts = ExitCounts()
    for event in events:
        counts.count(event)
    return counts


def test_exits_are_counted_by_boundary():
    counts = counted(ExitTaken(8), ExitTaken(4), ExitTaken(4), ExitVerified(4, True), ExitVerified(8, False))
    assert counts.details() == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 8, "taken": 1, "stood": 0, "given_up": 1},
    ]
    assert ExitCounts().details() == []


def test_the_sequences_of_a_request_are_added_up():
    first, second = counted(ExitTaken(4), ExitVerified(4, True)), counted(ExitTaken(4), ExitTaken(6))
    assert ExitCounts.total([first, second, ExitCounts()]).details() == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 6, "taken": 1, "stood": 0, "given_up": 0},
    ]
    assert first.details() == [{"block": 4, "taken": 1, "stood": 1, "given_up": 0}]
