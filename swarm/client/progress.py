"""What a chain should do next, decided from what its hops have done so far. Pure.

A step travels down the chain by itself where servers push to each other. The client steps in where something is broken,
where a push did not happen, and where an answer is overdue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class HopState(Protocol):
    """What counts of a hop; see `swarm.client.hop_session.HopSession` for the meaning of each."""

    replied: int
    asked: int
    pushed: int
    due: float
    stale: bool

    @property
    def leaving(self) -> Exception | None: ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def received(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Done:
    """The last hop has answered."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something happens, or until the time `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand step `number` to hop `index`."""

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class Mend:
    """Hop `index` cannot go on as it is."""

    index: int
    overdue: bool = False


Action = Done | Wait | Deliver | Mend


def next_action(hops: Sequence[HopState], numbers: Sequence[int], now: float) -> Action:
    """The next action towards the answer to the last step of `numbers`.

    Args:
        hops: in the order of the route.
        numbers: the steps that some hop may still have to answer, ascending; the last one is the current step.
        now: seconds.
    """
    current = numbers[-1]
    if hops[-1].replied >= current:
        return Done()
    for index, hop in enumerate(hops):
        if hop.error is not None or hop.stale:
            return Mend(index)
    until = float("inf")
    for index, hop in enumerate(hops):
        number = next((number for number in numbers if number > hop.replied), None)
        if number is None:
            continue
        there = hop.received >= number
        handed = max(hop.asked, hop.pushed) >= number
        if hop.leaving is not None and not handed:
            return Mend(index)  # between two steps; what it was handed it still answers
        if there and not handed:
            return Deliver(index, number)
        if handed and now >= hop.due:
            # A push may have been lost; the server may have one more chance then. It knows a step that it has seen.
            return Deliver(index, number) if there and hop.asked < number else Mend(index, overdue=True)
        if handed:
            until = min(until, hop.due)
    return Wait(until)
