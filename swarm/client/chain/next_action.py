"""What a chain does next, decided from the progress of its hops. Pure.

A step travels down the chain by itself where servers push to each other. The client acts where something is broken,
where a push did not happen, and where an answer is overdue. A step that came by a push may wait for two deadlines: at
the first one the client delivers its own copy, because the push may have been lost; at the second, the server is
overdue.

Several steps may be under way at once if each continues the one before (the chunks of a long prompt). Then the client
delivers further steps to the first server before it has answered, up to a window, so that all servers work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.client.hops.hop_progress import NO_DEADLINE, NO_STEP, HopProgress


@dataclass(frozen=True, slots=True)
class Finished:
    """The wanted steps are answered."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to do until something happens, or until `time`."""

    time: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand step `number` to hop `index`."""

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class Repair:
    """Hop `index` cannot go on as it is; `overdue` if that is because its answer has not come in time."""

    index: int
    overdue: bool = False


Action = Finished | WaitUntil | Deliver | Repair


def next_action(
    hops: Sequence[HopProgress],
    numbers: Sequence[int],
    now: float,
    window: int = 1,
    everywhere: bool = False,
) -> Action:
    """The next action towards the answer to the last step of `numbers`.

    Args:
        hops: in the order of the route.
        numbers: the steps that some hop may still have to answer, ascending; the last one is the current step.
        now: seconds, on the clock of the hops' deadlines.
        window: steps that a hop may have been handed without having answered. More than one only if each step just
            continues the one before, so that a server that misses one refuses the next.
        everywhere: every hop has to answer, also those for whose outputs the caller does not wait.
    """
    if not numbers or min((hop.replied for hop in hops) if everywhere else [hops[-1].replied]) >= numbers[-1]:
        return Finished()
    for index, hop in enumerate(hops):
        if hop.error is not None or hop.stale:
            return Repair(index)
    until = NO_DEADLINE
    for index, hop in reversed(list(enumerate(hops))):  # the step nearest to its end goes first
        action = _next_at(index, hop, numbers, now, window)
        if index == 0 and window == 1 and isinstance(action, Deliver) and _is_behind(hops, numbers, action.number):
            continue
        if not isinstance(action, WaitUntil):
            return action
        until = min(until, action.time)
    return WaitUntil(until)


def is_handed_on(following: HopProgress, number: int, newest: int) -> bool:
    """Whether a step that a hop has just answered is at the next one already. Then nothing but the time has changed for
    `next_action`, if only the last hop is waited for.

    Args:
        following: the hop behind.
        number: of the step.
        newest: number of the newest step. An answer to another one may allow for the next.
    """
    return number == newest and _handed(following) >= number


def _is_behind(hops: Sequence[HopProgress], numbers: Sequence[int], number: int) -> bool:
    """Whether a server whose cache was refilled still lacks a step before `number`.

    Then that step must not set out: it would be pushed there and refused, and that ends the pushes to this server.
    """
    before = max((earlier for earlier in numbers if earlier < number), default=NO_STEP)
    return any(hop.replied < min(hop.catch_up_to, before) for hop in hops[1:])


def _handed(hop: HopProgress) -> int:
    """The last step that a hop was handed."""
    return max(hop.replied, hop.delivered, hop.pushed)


def _next_at(index: int, hop: HopProgress, numbers: Sequence[int], now: float, window: int) -> Action:
    """The next action at one hop that works."""
    replied, handed = hop.replied, _handed(hop)
    under_way: list[int] = []
    upcoming: int | None = None
    for number in numbers:
        if number > handed:
            upcoming = number
            break
        if number > replied:
            under_way.append(number)
    if under_way and now >= hop.deadline:
        # A push may have been lost, so deliver the step: the server recognizes a step that it has seen.
        first = under_way[0]
        return Deliver(index, first) if hop.delivered < first <= hop.received else Repair(index, overdue=True)
    if upcoming is not None:
        if hop.leaving is not None:  # it answers what it has begun, and gets nothing more
            if not under_way:
                return Repair(index)
        elif upcoming <= hop.received and len(under_way) < window:
            return Deliver(index, upcoming)
    return WaitUntil(hop.deadline if under_way else NO_DEADLINE)
