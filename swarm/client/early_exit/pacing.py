"""How each step of a text is sent off: whether it is looked at on its way, and which servers need not hurry with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.client.early_exit.exit_terms import is_computed_by_one_server, next_server
from swarm.client.early_exit.group_size import GroupMeter
from swarm.client.early_exit.look_meter import LookMeter
from swarm.client.early_exit.options import EarlyExit
from swarm.data_structures import Route


@dataclass(frozen=True)
class Pace:
    """How one step is sent off.

    Attributes:
        looks: its token is looked at on its way.
        exit_block: see `StepRequest`.
    """

    looks: bool
    exit_block: int | None


@dataclass(frozen=True)
class _Sent:
    """The step before: when it was sent off, its number in its group, and whether the server holds it."""

    at: float
    number: int
    is_held: bool


class Pacing:
    """The pace of the steps of one `generate` call.

    Between servers, tokens leave wherever they are sure, unless looking costs more than it gains. Where one server has
    the blocks on both sides of the first boundary and all behind, they leave in groups; see `group_size`. A group of
    one is a step as without early exit.

    Args:
        options: when tokens leave.
        groups: what the session has measured.
        now: clock in seconds.
    """

    def __init__(self, options: EarlyExit, groups: GroupMeter, now: Callable[[], float] = time.perf_counter) -> None:
        self._options, self._groups, self._now = options, groups, now
        self._looks = LookMeter()
        self._before: _Sent | None = None
        self._left_in_group = 0

    def next(self, route: Route, boundaries: Sequence[int], follows: bool) -> Pace:
        """The pace of the step that is sent off now.

        Args:
            boundaries: in front of which it can be looked at.
            follows: its token is a guess: the one before has left.
        """
        first = self._options.first_exit(boundaries)
        if first is None or not is_computed_by_one_server(route, first):
            looks = not self._options.verify or self._looks.is_worth_looking()
            return Pace(looks, next_server(route, first) if looks and first is not None else None)
        number = self._next_in_group(follows)
        is_held = self._left_in_group > 0
        self._before = _Sent(self._now(), number, is_held)
        return Pace(is_held or not self._options.verify, first if is_held else None)

    def on_look(self, seconds: float) -> None:
        """A look at a token took so long."""
        self._looks.on_look(seconds)

    def on_answer(self, lag_s: float) -> None:
        """The last server has answered so long after the token could be looked at first."""
        self._looks.on_answer(lag_s)

    def on_verified(self, stands: bool) -> None:
        """The successor of a token that left stands, or does not."""
        self._groups.on_verified(stands)

    def _next_in_group(self, follows: bool) -> int:
        """The number, from 1 on, in its group."""
        before = self._before
        if before is not None:
            seconds = self._now() - before.at
            if not before.is_held:
                self._groups.on_last(seconds, before.number)
            else:
                self._groups.on_held(seconds, left=follows)
                if follows and not self._options.verify:
                    self._groups.on_verified(True)
        if before is None or not before.is_held or not follows:
            self._left_in_group = self._groups.next_size() - 1
            return 1
        self._left_in_group -= 1
        return before.number + 1
