"""What a chain should do next, decided from what its hops have done so far. Pure.

A step travels down the chain by itself where servers push to each other. The client steps in where something is broken,
where a push did not happen, and where an answer is overdue.

Several steps may be under way at once, each the continuation of the one before (the chunks of a long prompt). Then the
client hands the first server further steps before it has answered, up to a window, so that all servers work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class HopState(Protocol):
    """What counts of a hop; see `swarm.client.chain.hop_session.HopSession` for the meaning of each."""

    replied: int
    asked: int
    pushed: int
    owes: int
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
    """What was wanted is answered."""


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


def next_action(
    hops: Sequence[HopState], numbers: Sequence[int], now: float, window: int = 1, everywhere: bool = False
) -> Action:
    """The next action towards the answer to the last step of `numbers`.

    Args:
        hops: in the order of the route.
        numbers: the steps that some hop may still have to answer, ascending; the last one is the current step.
        now: seconds.
        window: steps that a hop may have been handed and not answered. More than one only where each step does nothing
            but continue the one before, so that a server that misses one refuses the next.
        everywhere: every hop has to answer, also those whose outputs the person does not wait for.
    """
    if not numbers or min((hop.replied for hop in hops) if everywhere else [hops[-1].replied]) >= numbers[-1]:
        return Done()
    for index, hop in enumerate(hops):
        if hop.error is not None or hop.stale:
            return Mend(index)
    until = float("inf")
    for index, hop in reversed(list(enumerate(hops))):  # what is nearest to its end goes first
        action = _next_at(index, hop, numbers, now, window)
        if index == 0 and window == 1 and isinstance(action, Deliver) and _is_behind(hops, numbers, action.number):
            continue
        if not isinstance(action, Wait):
            return action
        until = min(until, action.until)
    return Wait(until)


def _is_behind(hops: Sequence[HopState], numbers: Sequence[int], number: int) -> bool:
    """Whether a server whose cache was filled again still lacks a step before `number`.

    Then that step must not set out: it would be pushed there, and if it sets rows back it would not be refused.
    """
    before = max((earlier for earlier in numbers if earlier < number), default=-1)
    return any(hop.replied < min(hop.owes, before) for hop in hops[1:])


def _next_at(index: int, hop: HopState, numbers: Sequence[int], now: float, window: int) -> Action:
    """The next action at one hop that works."""
    handed = max(hop.asked, hop.pushed)
    under_way = [number for number in numbers if hop.replied < number <= handed]
    upcoming = next((number for number in numbers if number > max(hop.replied, handed)), None)
    if under_way and now >= hop.due:
        # A push may have been lost; the server may have one more chance then. It knows a step that it has seen.
        first = under_way[0]
        return Deliver(index, first) if hop.asked < first <= hop.received else Mend(index, overdue=True)
    if upcoming is not None:
        if hop.leaving is not None:
            if not under_way:  # between two steps; what it was handed it still answers
                return Mend(index)
        elif upcoming <= hop.received and len(under_way) < window:
            return Deliver(index, upcoming)
    return Wait(hop.due if under_way else float("inf"))
