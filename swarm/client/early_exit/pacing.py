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


@dataclass
class _Group:
    """The steps that were sent off since `began`, to be verified together.

    Attributes:
        size: how many there may be.
        sent: how many there are.
    """

    began: float
    size: int
    sent: int = 0

    @property
    def is_held(self) -> bool:
        """Whether the server holds the newest step for further ones."""
        return self.sent < self.size


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
        self._group: _Group | None = None

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
        if self._group is None or not self._continue(self._group, follows):
            self._group = _Group(self._now(), self._groups.next_size())
        self._group.sent += 1
        is_held = self._group.is_held
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

    def _continue(self, group: _Group, follows: bool) -> bool:
        """Whether the next step goes on with the group; if not, note what became of it."""
        if group.is_held:
            self._groups.on_look(follows)
            if follows:
                if not self._options.verify:
                    self._groups.on_verified(True)
                return True
        self._groups.on_group(group.sent, self._now() - group.began, recalled=group.is_held)
        return False
