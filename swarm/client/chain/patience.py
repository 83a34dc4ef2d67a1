"""When a session asks other servers beside one that is late, or leaves one that is slow all the time. Pure.

To ask costs a replay of all that went in. So a session waits as long as such answers usually take, with their spread,
and then as long again as asking will cost: whatever happens after that, it has lost at most twice what it had to (the
rule for renting skis; Karlin, Manasse, Rudolph and Sleator, 1988). The same holds for a server that is merely slower
than another one would be: it is left when it has cost as much as leaving it.

A machine that is busy makes all servers late, or all but one. So what counts as late is stretched by as much as the
other servers of the route are slower than usual just now; and a session may ask once, and then for one step in fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.client.hops.hop_clock import NO_DEADLINE, HopClock

ASKED_SHARE = 0.02
"""Share of its steps for which a session may ask other servers, beyond the first."""

MAX_ALLOWANCE = 2.0
"""Steps, one after the other, for which it may ask."""

MAX_SLOWNESS = 8.0
"""How many times longer than usual other servers excuse one that is late, at most."""

LOOK_INTERVAL_S = 5.0
"""Seconds after which it is looked again whether other servers would be quicker: to plan a route takes as long as a few
tokens in a large swarm."""

MIN_MEASURED_STEPS = 8
"""Steps after which it is known how long a server takes."""

MIN_GAIN = 0.5
"""Share of its time that a step has to save elsewhere: what was announced, or measured long ago, is not exact."""


class WaitedHop(Protocol):
    """What counts of a hop here; see `swarm.client.hops.hop_progress.HopProgress`."""

    asked: int
    clock: HopClock

    @property
    def awaited(self) -> int | None: ...

    @property
    def replied(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LateHop:
    """The hop whose answer is late first.

    Attributes:
        index: where it is in the route.
        number: the step that it has not answered.
        time: when other servers are asked, on the clock of the hops.
    """

    index: int
    number: int
    time: float


class AskAllowance:
    """How often a session may still ask other servers."""

    def __init__(self) -> None:
        self._left = 1.0

    def on_answered(self) -> None:
        """A step has come to its end."""
        self._left = min(self._left + ASKED_SHARE, MAX_ALLOWANCE)

    def take(self) -> bool:
        """Whether it may ask now; then that counts."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def none_late_before(hops: Sequence[WaitedHop]) -> float:
    """A time before which no answer is late, or overdue. The rest makes that later, and takes longer to find out."""
    return min([min(hop.clock.late_at(), hop.clock.deadline) for hop in hops])


def first_late(hops: Sequence[WaitedHop], refill_seconds: Sequence[float]) -> LateHop | None:
    """The hop for which others are asked first, if none answers before; None if no answer is awaited.

    Nobody is asked twice for one step, nor for a step of which a server behind has made something already.

    Args:
        hops: in the order of the route.
        refill_seconds: what it takes until another server has what each of them has.
    """
    found: LateHop | None = None
    for index, (hop, refill) in enumerate(zip(hops, refill_seconds, strict=True)):
        number = hop.awaited
        if number is None or number <= hop.asked or any(behind.replied >= number for behind in hops[index + 1 :]):
            continue
        time = hop.clock.late_at(common_slowness(hops, index)) + refill
        if time < NO_DEADLINE and (found is None or time < found.time):
            found = LateHop(index, number, time)
    return found


def common_slowness(hops: Sequence[WaitedHop], index: int) -> float:
    """How many times slower than usual all hops but one are just now; 1 if one of them is not."""
    others = [hop.clock.slowness for other, hop in enumerate(hops) if other != index]
    return min(max(1.0, min(others, default=1.0)), MAX_SLOWNESS)


def is_worth_leaving(seconds: float, elsewhere: float, steps: int, refill_seconds: float) -> bool:
    """Whether a server that works has cost so much that it is better left.

    Args:
        seconds: what a step takes there.
        elsewhere: what it would take at other servers.
        steps: that it has computed.
        refill_seconds: what it takes until the others have what it has.
    """
    gain = seconds - elsewhere
    return gain >= MIN_GAIN * seconds and steps * gain >= refill_seconds
