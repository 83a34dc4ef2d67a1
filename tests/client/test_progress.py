"""What a chain does next: the table, and whole steps against servers that behave in every way."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.progress import Deliver, Done, Mend, Wait, next_action
from swarm.errors import PeerLost

INF = float("inf")
NOW = 100.0
SOON, PAST = NOW + 1, NOW - 1


@dataclass
class State:
    """A hop: the last steps that it answered, whose input is known, that the client handed over, that were pushed."""

    replied: int = 0
    received: int = 0
    asked: int = 0
    pushed: int = 0
    owes: int = -1
    due: float = INF
    stale: bool = False
    error: Exception | None = None
    leaving: Exception | None = None


LOST = PeerLost("gone")

TABLE = [
    pytest.param([State(1, 1, 1)], [1], Done(), id="answered"),
    pytest.param([State(0, 1), State(1, 1)], [1], Done(), id="the last one has answered; copies may follow"),
    pytest.param([State(0, 1, error=LOST), State(1, 1)], [1], Done(), id="answered; what broke can wait"),
    pytest.param([State(0, 1), State()], [1], Deliver(0, 1), id="the first is handed the step"),
    pytest.param([State(0, 1, 1, due=SOON), State()], [1], Wait(SOON), id="under way"),
    pytest.param([State(1, 1, 1), State(0, 1, pushed=1, due=SOON)], [1], Wait(SOON), id="pushed"),
    pytest.param([State(1, 1, 1), State(0, 1)], [1], Deliver(1, 1), id="not pushed"),
    pytest.param([State(1, 1, 1), State(0, 1, pushed=1, due=PAST)], [1], Deliver(1, 1), id="a push was lost"),
    pytest.param([State(1, 1, 1), State(0, 1, 1, 1, due=PAST)], [1], Mend(1, overdue=True), id="silent"),
    pytest.param([State(0, 1, 1, due=PAST), State()], [1], Mend(0, overdue=True), id="the first is silent"),
    pytest.param([State(0, 1, 1, due=NOW), State()], [1], Mend(0, overdue=True), id="just due"),
    pytest.param([State(0, 1), State(error=LOST)], [1], Mend(1), id="broken before its turn"),
    pytest.param([State(0, 1), State(stale=True)], [1], Mend(1), id="stale"),
    pytest.param([State(0, 1, 1, due=SOON, leaving=LOST)], [1], Wait(SOON), id="leaving, but at work"),
    pytest.param([State(0, 1, 1, due=PAST, leaving=LOST)], [1], Mend(0, overdue=True), id="left without an answer"),
    pytest.param([State(0, 1, leaving=LOST)], [1], Mend(0), id="leaving"),
    pytest.param([State(0, 1, 1, due=SOON), State(leaving=LOST)], [1], Mend(1), id="leaving before its turn"),
    pytest.param([State(error=LOST), State(error=LOST)], [1], Mend(0), id="two broken"),
    pytest.param([State(0, 2, 1, due=SOON), State(1, 1)], [1, 2], Wait(SOON), id="first the older step"),
    pytest.param([State(1, 2, 1), State(1, 1)], [1, 2], Deliver(0, 2), id="then the newer one"),
    pytest.param([State(2, 2, 2), State(0, 2, 0, 0), State(1, 1)], [1, 2], Deliver(1, 1), id="a fresh hop catches up"),
    pytest.param([State(0, 3), State(0, 1)], [3], Deliver(0, 3), id="numbers may be left out"),
    pytest.param([State(0, 1, 1, due=SOON), State(0, 1, pushed=1, due=NOW + 9)], [1], Wait(SOON), id="soonest"),
]


@pytest.mark.parametrize(("hops", "numbers", "action"), TABLE)
def test_table(hops, numbers, action):
    assert next_action(hops, numbers, NOW) == action


@dataclass
class Play:
    """Steps of a session against simulated servers; `next_action` decides, chance does everything else.

    A server that gets a step answers after a while, or never. Its push arrives, or not; it says so, or not.
    """

    chance: random.Random
    length: int
    losses: float
    now: float = 0.0
    events: list[tuple[float, int, tuple]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = itertools.count()
        self.hops = [State(-1, -1, -1, -1) for _ in range(self.length)]
        self.live: list[int] = []

    def later(self, *event) -> None:
        heapq.heappush(self.events, (self.now + self.chance.uniform(0.01, 2), next(self.order), event))

    def lose(self) -> bool:
        return self.chance.random() < self.losses

    def step(self, number: int) -> None:
        self.live.append(number)
        self.hops[0].received = number
        for _ in range(1000):
            action = next_action(self.hops, self.live, self.now)
            match action:
                case Done():
                    assert self.hops[-1].replied >= number
                    done = min(hop.replied for hop in self.hops)
                    self.live = [number for number in self.live if number > done]
                    return
                case Deliver(index, wanted):
                    hop = self.hops[index]
                    assert hop.replied < wanted <= hop.received, "only what is known can be delivered"
                    assert hop.asked < wanted, "nothing is delivered twice to the same server"
                    hop.asked, hop.due = wanted, self.now + 3
                    self.handed(hop, wanted)
                case Mend(index, overdue):
                    hop = self.hops[index]
                    if overdue:
                        assert hop.error is None
                        assert not hop.stale
                    else:
                        assert hop.error is not None or hop.stale or hop.leaving is not None
                    done = min(hop.replied, hop.received, number - 1)
                    self.hops[index] = State(done, hop.received, done, done)
                case Wait(until):
                    assert until < INF, "nobody would ever wake up"
                    assert until > self.now
                    if self.events and self.events[0][0] <= until:
                        self.now, _, event = heapq.heappop(self.events)
                        self.happen(*event)
                    else:
                        self.now = until
        raise AssertionError("no end in sight")

    def handed(self, hop: State, number: int) -> None:
        """The server computes, unless it dies of it."""
        if not self.lose():
            self.later("reply", hop, number)
        elif self.chance.random() < 0.5:
            self.later("break", hop, number)

    def happen(self, what: str, hop: State, number: int) -> None:
        if not any(hop is one for one in self.hops) or hop.error is not None:
            return
        if what == "break":
            hop.error = LOST
        elif what == "push" and number > hop.replied:
            self.handed(hop, number)
        elif what == "reply" and number > hop.replied and number == min(n for n in self.live if n > hop.replied):
            hop.replied = number
            more = max(hop.asked, hop.pushed) > number
            hop.due = self.now + 3 if more else INF
            index = next(index for index, one in enumerate(self.hops) if one is hop)
            if index + 1 < self.length:
                following = self.hops[index + 1]
                following.received = max(following.received, number)
                pushes = self.chance.random() < 0.7
                if pushes and not self.lose():
                    self.later("push", following, number)
                if pushes and following.replied < number:
                    following.pushed, following.due = max(following.pushed, number), self.now + 3
        if self.chance.random() < 0.02:
            self.chance.choice(self.hops).stale = True
        if self.chance.random() < 0.02:
            self.chance.choice(self.hops).leaving = LOST


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.4]))
@settings(max_examples=100)
def test_every_step_comes_to_its_end_whatever_the_servers_do(chance, length, losses):
    play = Play(chance, length, losses)
    for number in range(6):
        play.step(number)
