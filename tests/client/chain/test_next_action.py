"""What a chain does next: the table, and whole steps against servers that behave in every way."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.chain.next_action import Action, Deliver, Finished, Repair, WaitUntil, is_handed_on, next_action
from swarm.errors import PeerLost

INF = float("inf")
NOW = 100.0
SOON, PAST = NOW + 1, NOW - 1


@dataclass
class State:
    """A hop: the last steps that it answered, whose input is known, that the client handed over, that were pushed."""

    replied: int = 0
    received: int = 0
    delivered: int = 0
    pushed: int = 0
    catch_up_to: int = -1
    deadline: float = INF
    stale: bool = False
    error: Exception | None = None
    leaving: Exception | None = None


LOST = PeerLost("gone")

TABLE = [
    pytest.param([State(1, 1, 1)], [1], Finished(), id="answered"),
    pytest.param([State(0, 1), State(1, 1)], [1], Finished(), id="the last one has answered; copies may follow"),
    pytest.param([State(0, 1, error=LOST), State(1, 1)], [1], Finished(), id="answered; what broke can wait"),
    pytest.param([State(0, 1), State()], [1], Deliver(0, 1), id="the first is handed the step"),
    pytest.param([State(0, 1, 1, deadline=SOON), State()], [1], WaitUntil(SOON), id="under way"),
    pytest.param([State(1, 1, 1), State(0, 1, pushed=1, deadline=SOON)], [1], WaitUntil(SOON), id="pushed"),
    pytest.param([State(1, 1, 1), State(0, 1)], [1], Deliver(1, 1), id="not pushed"),
    pytest.param([State(1, 1, 1), State(0, 1, pushed=1, deadline=PAST)], [1], Deliver(1, 1), id="a push was lost"),
    pytest.param([State(1, 1, 1), State(0, 1, 1, 1, deadline=PAST)], [1], Repair(1, overdue=True), id="silent"),
    pytest.param([State(0, 1, 1, deadline=PAST), State()], [1], Repair(0, overdue=True), id="the first is silent"),
    pytest.param([State(0, 1, 1, deadline=NOW), State()], [1], Repair(0, overdue=True), id="just deadline"),
    pytest.param([State(0, 1), State(error=LOST)], [1], Repair(1), id="broken before its turn"),
    pytest.param([State(0, 1), State(stale=True)], [1], Repair(1), id="stale"),
    pytest.param([State(0, 1, 1, deadline=SOON, leaving=LOST)], [1], WaitUntil(SOON), id="leaving, but at work"),
    pytest.param(
        [State(0, 1, 1, deadline=PAST, leaving=LOST)], [1], Repair(0, overdue=True), id="left without an answer"
    ),
    pytest.param([State(0, 1, leaving=LOST)], [1], Repair(0), id="leaving"),
    pytest.param([State(0, 1, 1, deadline=SOON), State(leaving=LOST)], [1], Repair(1), id="leaving before its turn"),
    pytest.param([State(error=LOST), State(error=LOST)], [1], Repair(0), id="two broken"),
    pytest.param([State(0, 2, 1, deadline=SOON), State(1, 1)], [1, 2], WaitUntil(SOON), id="first the older step"),
    pytest.param([State(1, 2, 1), State(1, 1)], [1, 2], Deliver(0, 2), id="then the newer one"),
    pytest.param([State(2, 2, 2), State(0, 2, 0, 0), State(1, 1)], [1, 2], Deliver(1, 1), id="a fresh hop catches up"),
    pytest.param(
        [State(1, 2, 1), State(0, 1, 1, catch_up_to=1, deadline=SOON), State(1, 1)],
        [1, 2],
        WaitUntil(SOON),
        id="nothing overtakes it",
    ),
    pytest.param([State(0, 3), State(0, 1)], [3], Deliver(0, 3), id="numbers may be left out"),
    pytest.param(
        [State(0, 1, 1, deadline=SOON), State(0, 1, pushed=1, deadline=NOW + 9)], [1], WaitUntil(SOON), id="soonest"
    ),
    pytest.param([State()], [], Finished(), id="nothing to do"),
]

SEVERAL = [
    pytest.param([State(0, 4, 1, deadline=SOON), State()], Deliver(0, 2), id="the next one follows at once"),
    pytest.param([State(0, 4, 2, deadline=SOON), State()], WaitUntil(SOON), id="the window is full"),
    pytest.param([State(1, 4, 2, deadline=SOON), State(0, 1, pushed=1, deadline=SOON)], Deliver(0, 3), id="all work"),
    pytest.param(
        [State(2, 4, 3, deadline=SOON), State(0, 2)], Deliver(1, 1), id="what is nearest to its end goes first"
    ),
    pytest.param(
        [State(2, 4, 4, deadline=SOON), State(0, 2, 1, deadline=SOON)], Deliver(1, 2), id="without pushes, too"
    ),
    pytest.param(
        [State(2, 4, 4, deadline=SOON), State(0, 2, 1, 2, deadline=PAST)], Repair(1, overdue=True), id="silent"
    ),
    pytest.param(
        [State(2, 4, 4, deadline=SOON), State(0, 2, pushed=2, deadline=PAST)], Deliver(1, 1), id="pushes were lost"
    ),
    pytest.param([State(3, 4, 4, deadline=SOON), State(1, 3, 2, 3, deadline=SOON)], WaitUntil(SOON), id="under way"),
    pytest.param(
        [State(0, 4, 1, deadline=SOON, leaving=LOST), State()], WaitUntil(SOON), id="leaving: no more, but these"
    ),
    pytest.param(
        [State(1, 4, 1, leaving=LOST), State(0, 1, pushed=1, deadline=SOON)], Repair(0), id="then it may leave"
    ),
    pytest.param([State(0, 4, 1, deadline=SOON), State(error=LOST)], Repair(1), id="first what is broken"),
    pytest.param([State(4, 4, 4), State(3, 4, pushed=4, deadline=SOON)], WaitUntil(SOON), id="the last one"),
    pytest.param([State(3, 4, 4, deadline=SOON), State(4, 4, pushed=4)], Finished(), id="answered"),
]


@pytest.mark.parametrize(("hops", "numbers", "action"), TABLE)
def test_table(hops, numbers, action):
    assert next_action(hops, numbers, NOW) == action


@pytest.mark.parametrize(("hops", "action"), SEVERAL)
def test_several_steps_at_once(hops, action):
    assert next_action(hops, [1, 2, 3, 4], NOW, window=2) == action


def test_everywhere():
    hops = [State(0, 1, 1, deadline=SOON), State(1, 1, pushed=1)]
    assert next_action(hops, [1], NOW) == Finished()
    assert next_action(hops, [1], NOW, everywhere=True) == WaitUntil(SOON)
    assert next_action([State(1, 1, 1), hops[1]], [1], NOW, everywhere=True) == Finished()


@dataclass
class Server(State):
    """A hop, and the server behind it: the last step that it computed, and when the last of its messages arrives."""

    computed: int = -1
    rejected: int = -1
    latest: dict[str, float] = field(default_factory=dict)


@dataclass
class Play:
    """Steps of a session against simulated servers; `next_action` decides, chance does everything else.

    A server that gets a step answers after a while, or dies of it, or falls silent. Its push arrives, or not; it says
    so, or not. What travels the same way arrives in order. A step is refused by a server that has not computed the one
    before.
    """

    chance: random.Random
    length: int
    losses: float
    now: float = 0.0
    looks: Callable[[], Action] | None = None
    alone: int = 0
    events: list[tuple[float, int, tuple]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = itertools.count()
        self.hops = [Server(-1, -1, -1, -1) for _ in range(self.length)]
        self.live: list[int] = []

    def later(self, way: str, what: str, hop: Server, number: int) -> None:
        hop.latest[way] = max(self.now, hop.latest.get(way, 0.0)) + self.chance.uniform(0.01, 2)
        heapq.heappush(self.events, (hop.latest[way], next(self.order), (what, hop, number)))

    def lose(self) -> bool:
        return self.chance.random() < self.losses

    def call(self, numbers: range, window: int) -> None:
        """Several steps that continue each other."""
        if len(numbers) > 1:
            self.advance(1, everywhere=True)
        self.live += numbers
        self.hops[0].received = numbers[-1]
        self.advance(window)
        assert self.hops[-1].computed >= numbers[-1]
        done = min(hop.replied for hop in self.hops)
        self.live = [number for number in self.live if number > done]

    def advance(self, window: int, everywhere: bool = False) -> None:
        def look() -> Action:
            return next_action(self.hops, self.live, self.now, window, everywhere)

        self.looks = look if not everywhere else None
        for _ in range(3000):
            match look():
                case Finished():
                    return
                case Deliver(index, wanted):
                    hop = self.hops[index]
                    assert hop.replied < wanted <= hop.received, "only what is known can be delivered"
                    assert hop.delivered < wanted, "nothing is delivered twice to the same server"
                    ahead = [n for n in self.live if hop.replied < n < wanted]
                    assert all(n <= max(hop.delivered, hop.pushed) for n in ahead), "in order"
                    assert len(ahead) < window
                    hop.delivered = wanted
                    self.start_clock(hop, wanted)
                    self.later("client", "arrive", hop, wanted)
                case Repair(index, overdue):
                    hop = self.hops[index]
                    if overdue:
                        assert hop.error is None
                        assert not hop.stale
                    elif hop.error is None and not hop.stale:
                        self.leave(index)
                        continue
                    done = min(hop.replied, hop.received)
                    catch_up_to = max(self.live)
                    self.hops[index] = Server(done, hop.received, done, done, catch_up_to, computed=done)
                case WaitUntil(until):
                    assert until < INF, "nobody would ever wake up"
                    assert until > self.now
                    if self.events and self.events[0][0] <= until:
                        self.now, _, event = heapq.heappop(self.events)
                        self.happen(*event)
                    else:
                        self.now = until
        raise AssertionError("no end in sight")

    def leave(self, index: int) -> None:
        """Another server takes the place of one that leaves."""
        hop = self.hops[index]
        assert hop.leaving is not None
        begun = [number for number in self.live if number <= max(hop.delivered, hop.pushed)]
        assert all(hop.replied >= number for number in begun), "what it has begun it ends"
        done = min(hop.received, hop.replied)
        self.hops[index] = Server(done, hop.received, done, done, max(self.live), computed=done)

    def start_clock(self, hop: Server, number: int) -> None:
        if number == min((n for n in self.live if n > hop.replied), default=-1):
            hop.deadline = self.now + 6

    def before(self, number: int) -> int:
        return max((earlier for earlier in self.live if earlier < number), default=-1)

    def happen(self, what: str, hop: Server, number: int) -> None:
        index = next((index for index, one in enumerate(self.hops) if one is hop), None)
        if index is None or hop.error is not None:
            return
        if what == "break":
            hop.error = LOST
        elif what == "arrive":
            self.arrive(hop, index, number)
        elif what == "reply" and number > hop.replied:
            self.reply(hop, index, number)
            if self.looks and hop.replied == number and index + 1 < self.length:
                self.need_not_look(self.hops[index + 1], number)
        elif what == "pushed" and number > hop.replied:
            if max(hop.replied, hop.delivered, hop.pushed) >= self.before(number) and hop.rejected < number:
                hop.pushed = max(hop.pushed, number)
                self.start_clock(hop, number)
        elif what == "refuse" and number > hop.replied:
            if number > hop.delivered:
                hop.pushed, hop.rejected = min(hop.pushed, hop.delivered), max(hop.rejected, number)
            else:
                hop.stale = True
        if self.chance.random() < 0.02:
            self.chance.choice(self.hops).stale = True
        if self.chance.random() < 0.02:
            self.chance.choice(self.hops).leaving = LOST

    def need_not_look(self, following: Server, number: int) -> None:
        """Where a step goes on alone, there is nothing to do but to wait for the first deadline."""
        deadline = min(hop.deadline for hop in self.hops)
        if is_handed_on(following, number, self.live[-1]) and deadline > self.now:
            assert self.looks() == WaitUntil(deadline)
            self.alone += 1

    def arrive(self, hop: Server, index: int, number: int) -> None:
        """At the server."""
        if number < hop.computed:
            return
        if number > hop.computed:
            if hop.computed < self.before(number):
                self.later("back", "refuse", hop, number)
                return
            hop.computed = number
        if self.lose():
            if self.chance.random() < 0.5:
                self.later("back", "break", hop, number)
            return
        self.later("back", "reply", hop, number)
        if index + 1 < self.length and self.chance.random() < 0.7:
            following = self.hops[index + 1]
            if not self.lose():
                self.later("push", "arrive", following, number)
            self.later("said", "pushed", following, number)

    def reply(self, hop: Server, index: int, number: int) -> None:
        """At the client."""
        if hop.replied < self.before(number):
            hop.stale = True  # an answer before it was lost
            return
        hop.replied = number
        hop.deadline = INF
        under_way = [n for n in self.live if number < n <= max(hop.delivered, hop.pushed)]
        if under_way:
            self.start_clock(hop, under_way[0])
        if index + 1 < self.length:
            following = self.hops[index + 1]
            assert following.received >= self.before(number), "records have no holes"
            following.received = max(following.received, number)


def test_where_nothing_is_lost_most_steps_go_on_alone():
    play = Play(random.Random(7), 3, 0.0)
    for number in range(200):
        play.call(range(number, number + 1), 1)
    assert play.alone > 100


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=200, deadline=None)
def test_every_step_comes_to_its_end_whatever_the_servers_do(seed, servers, losses):
    chance = random.Random(seed)
    play = Play(chance, servers, losses)
    number = 0
    for _ in range(6):
        steps = chance.choice([1, 1, 2, 5, 9])
        play.call(range(number, number + steps), chance.randint(1, 4) if steps > 1 else 1)
        number += steps
