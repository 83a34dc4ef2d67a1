"""Groups of steps at one server that exists on paper: the texts are the same, and nothing is waited for in silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit.exit_decoder import ExitDecoder, Sampling
from swarm.client.early_exit.exit_terms import is_computed_by_one_server, next_server
from swarm.client.early_exit.group_size import GroupMeter
from swarm.client.early_exit.options import EarlyExit
from swarm.client.early_exit.pacing import Pace, Pacing
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.routes.events import ExitVerified
from swarm.data_structures import Hop, Route, Span
from swarm.models.exits.trained_exits import BaseModel, TrainedExits
from tests.client.early_exit.paper_servers import PaperServers
from tests.infos import server_info

BLOCKS, CUT, VOCABULARY, NEW = 8, 3, 11, 8
BEHIND = 5
"""Time that the blocks behind the boundary take, for any number of steps. Those in front of it take 1."""


def route(*spans: tuple[int, int, str]) -> Route:
    return Route(tuple(Hop(server_info(start, end, peer), Span(start, end)) for start, end, peer in spans))


ONE_SERVER = route((0, CUT, "a"), (CUT, BLOCKS, "a"))


class FixedGroups(GroupMeter):
    """Groups of one size. Attributes: observed: what the meter was told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.observed: list[tuple[Any, ...]] = []

    def next_size(self) -> int:
        return self.size

    def on_look(self, leaves: bool) -> None:
        self.observed.append(("leaves", leaves))

    def on_group(self, size: int, seconds: float, recalled: bool) -> None:
        self.observed.append((size, recalled))


def right(position: int) -> int:
    """What the full model says behind so many tokens."""
    return (7 * position + 3) % VOCABULARY


@dataclass
class LoneServer(PaperServers):
    """It holds steps at the boundary until one comes that is not to be held, or the client says that it waits.

    Attributes:
        early: by position, what is said at the boundary, and whether it is sure.
        held: numbers of steps that wait there.
        verified_at: when each step was through.
        paces: exit blocks of all steps.
    """

    early: dict[int, tuple[int, bool]]
    groups: Any = field(kw_only=True)
    held: list[int] = field(default_factory=list)
    verified_at: dict[int, int] = field(default_factory=dict)
    paces: list[int | None] = field(default_factory=list)

    route = ONE_SERVER

    def boundaries_for(self, options: Any) -> tuple[int, ...]:
        return (CUT,)

    def send(self, tokens: torch.Tensor, exits: Any, exit_block: int | None) -> Any:
        number = len(self.sent)
        self.sent[number], self.positions[number] = self.now, tokens.shape[1]
        self.paces.append(exit_block)
        self.held.append(number)
        if exit_block is None:
            self.verify(self.now + 1)
        return SimpleNamespace(number=number, hidden=torch.zeros(1, 1, VOCABULARY))

    def verify(self, begins: int) -> None:
        self.verified_at.update(dict.fromkeys(self.held, begins + BEHIND))
        self.held.clear()

    def wait(self, ready: Any, awaited: Any = None) -> None:
        if awaited is not None:
            number, block = awaited
            assert self.has_outputs(SimpleNamespace(number=number), CUT)
            assert block == BLOCKS
            if number in self.held:
                self.verify(self.now)
        super().wait(ready)

    def has_outputs(self, step: Any, block: int) -> bool:
        if block == BLOCKS:
            return self.verified_at.get(step.number, 1 << 30) <= self.now
        return self.now >= self.sent[step.number] + 1

    def outputs(self, step: Any, block: int) -> torch.Tensor:
        position = self.positions[step.number]
        said, is_sure = (right(position), True) if block == BLOCKS else self.early[position]
        return torch.nn.functional.one_hot(torch.tensor([[said]]), VOCABULARY) * (9.0 if is_sure else 0.1)

    def left(self, step: Any, block: int) -> tuple[int, ...]:
        return (0,)

    def give_up(self, step: Any) -> None:
        self.held = [number for number in self.held if number < step.number]


def generate(early: dict[int, tuple[int, bool]], size: int, verify: bool = True) -> tuple[list[int], Any]:
    world: Any = LoneServer(early, groups=FixedGroups(size))
    sampling = Sampling(
        process=lambda tokens, logits: logits,
        is_finished=lambda tokens: torch.tensor([tokens.shape[1] >= 1 + NEW]),
        sample=False,
        pad=None,
        ends=None,
        max_length=1 + NEW,
    )
    options = EarlyExit(threshold=0.5, verify=verify, boundaries=(CUT,))
    exits = TrainedExits(BaseModel("m", "r", 1, BLOCKS))
    decoder = ExitDecoder(options, exits, world, world, sampling, TokenOutput())
    first = torch.nn.functional.one_hot(torch.tensor([right(1)]), VOCABULARY) * 9.0
    return decoder.generate(torch.tensor([[5]]), first)[0].tolist(), world


EXPECTED = [5, *(right(position) for position in range(1, 1 + NEW))]
SAID = st.fixed_dictionaries(
    {
        position: st.tuples(st.sampled_from([right(position), (right(position) + 1) % VOCABULARY]), st.booleans())
        for position in range(2, 1 + NEW)
    }
)


def group_seconds(early: dict[int, tuple[int, bool]], size: int) -> int:
    """How long the text takes: each group as long as its tokens leave, up to `size` and to the end of the text."""
    position, took = 2, 0
    while position < 1 + NEW:
        steps = 1
        while steps < size and early[at := position + steps - 1][1] and at < NEW:
            steps += 1
        took += steps + BEHIND
        said = [early[position + step][0] == right(position + step) for step in range(steps - 1)]
        position += next((number for number, stands in enumerate(said, 1) if not stands), steps)
    return took


@given(SAID, st.integers(1, 9))
def test_verified_texts_are_right_and_take_what_their_groups_take(early, size):
    text, world = generate(early, size)
    assert text == EXPECTED
    assert world.now == group_seconds(early, size)
    assert world.settled == sorted(world.settled)
    if size == 1:
        assert set(world.paces) == {None}
        assert not any(isinstance(event, ExitVerified) for event in world.events)


@given(SAID, st.integers(1, 9))
def test_unverified_texts_do_not_depend_on_groups(early, size):
    text, world = generate(early, size, verify=False)
    assert text == generate(early, 1, verify=False)[0]
    assert all(
        said == (early[position][0] if early[position][1] else right(position))
        for position, said in enumerate(text[2:], 2)
    )
    assert len(world.settled) == NEW - 1, "all caches are complete in the end"


@pytest.mark.parametrize("sure", [True, False])
def test_the_meter_learns_what_became_of_each_step(sure):
    early = {position: (right(position), sure) for position in range(2, 1 + NEW)}
    _, world = generate(early, 3)
    one = [("leaves", True), ("leaves", True), (3, False)] if sure else [("leaves", False), (1, True)]
    assert len(world.groups.observed) >= NEW - 2, "nothing is known of the last step"
    assert world.groups.observed == (one * NEW)[: len(world.groups.observed)]


def test_between_servers_there_are_no_groups():
    options, groups = EarlyExit(threshold=0.0, boundaries=(CUT,)), FixedGroups(1)
    for other in (route((0, CUT, "a"), (CUT, BLOCKS, "b")), route((0, CUT, "a"), (CUT, 6, "a"), (6, BLOCKS, "b"))):
        pacing = Pacing(options, groups)
        last = other.hops[-1].span.start
        assert [pacing.next(other, other.boundaries, follows=True) for _ in range(3)] == [Pace(True, last)] * 3
    assert not groups.observed


def test_one_server():
    assert is_computed_by_one_server(ONE_SERVER, CUT)
    assert is_computed_by_one_server(route((0, 1, "b"), (1, 3, "a"), (3, 8, "a")), 3)
    assert not is_computed_by_one_server(route((0, 1, "b"), (1, 3, "a"), (3, 8, "a")), 1)
    assert not is_computed_by_one_server(route((2, 8, "a")), 2), "the client has the blocks in front of it"
    assert not is_computed_by_one_server(ONE_SERVER, 5)
    assert next_server(route((0, 3, "a"), (3, 6, "a"), (6, 8, "b")), 3) == 6
    assert next_server(ONE_SERVER, CUT) is None
