"""Admission of requests: limits of a key, the queue, and turns of keys."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.gateway.admission import WINDOW_S, AdmissionControl, FairQueue, NotAdmitted, SlidingWindow
from swarm.gateway.api_keys import ApiKey, KeyLimits

FREE = KeyLimits()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20), st.integers(0, 60), st.integers(0, 50))
def test_a_window_knows_how_long_to_wait(steps, rest, amount):
    window, now = SlidingWindow(), 0.0
    for seconds, count in steps:
        now += seconds
        window.add(now, count)
    now += rest
    wait = window.seconds_until(now, amount)
    assert wait >= 0
    assert window.sum(now + wait) <= amount
    if wait > 0:
        earlier = SlidingWindow()
        for (_, count), when in zip(steps, [sum(s for s, _ in steps[: i + 1]) for i in range(len(steps))], strict=True):
            earlier.add(when, count)
        assert earlier.sum(now + wait - 0.5) > amount


def test_a_window_drops_old_entries_without_being_read():
    window = SlidingWindow()
    for second in range(1000):
        window.add(float(second), 1)
    assert len(window._entries) <= WINDOW_S


def fill(words):
    turns = FairQueue()
    for word in words.split():
        turns.push(word[0], word)
    return turns


def pop(turns):
    """The next one, which is also what was announced."""
    first = turns.first()
    assert turns.pop() is first
    return first


def test_keys_take_turns():
    for come, go in [
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 b1 c1 b2", "a1 b1 c1 a2 b2"),
        ("", ""),
    ]:
        turns = fill(come)
        assert " ".join(pop(turns) for _ in range(len(turns))) == go


def test_removed_items_are_not_next():
    turns = fill("a1 a2 b1")
    turns.remove("a", "a1")
    turns.remove("a", "a1")
    turns.remove("c", "c1")
    assert len(turns) == 2
    assert [turns.pop(), turns.pop()] == ["a2", "b1"]


def test_the_newest_request_of_the_longest_queue_gives_way():
    turns = fill("a1 b1 b2 b3 c1")
    assert turns.longest_key() == "b"
    assert turns.pop_newest("b") == "b3"
    assert (turns.count_of("b"), turns.count_of("d"), len(turns)) == (2, 0, 4)


@given(st.lists(st.tuples(st.sampled_from(["push", "pop"]), st.sampled_from("abc")), max_size=60))
def test_every_other_key_goes_before_a_waiting_request_at_most_once(steps):
    turns: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, int] = dict.fromkeys("abc", 0)
    passed: dict[str, dict[str, int]] = {}
    for number, (what, name) in enumerate(steps):
        if what == "push":
            turns.push(name, (name, number))
            waiting[name] += 1
            passed.setdefault(name, {})
        elif len(turns):
            gone, _ = turns.pop()
            waiting[gone] -= 1
            passed.pop(gone)
            for other in passed.values():
                other[gone] = other.get(gone, 0) + 1
                assert other[gone] == 1
            if waiting[gone]:
                passed[gone] = {}
        assert len(turns) == sum(waiting.values())


FREE = KeyLimits()


def key(name="ann", **limits):
    return ApiKey(name, KeyLimits(**limits))


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Visitor:
    """One request: waits, runs until `leave`, and uses some tokens."""

    who: ApiKey | None
    tokens: int = 1
    texts: int = 1
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    use: int | None = None

    def start(self, admission: AdmissionControl) -> Visitor:
        self.task = asyncio.create_task(self._visit(admission))
        return self

    async def _visit(self, admission: AdmissionControl) -> None:
        async with admission.admit(self.who, self.tokens, self.texts) as ticket:
            self.entered.set()
            await self.leave.wait()
            if self.use is not None:
                ticket.report_usage(self.use)

    async def go(self, use: int | None = None) -> None:
        self.use = use
        self.leave.set()
        await self.task


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def refusal(admission: AdmissionControl, who: ApiKey | None, tokens: int = 1) -> NotAdmitted:
    with pytest.raises(NotAdmitted) as raised:
        async with admission.admit(who, tokens):
            pass
    return raised.value


def run(test):
    asyncio.run(asyncio.wait_for(test, 30))


def test_requests_of_the_last_60_seconds_count():
    async def test():
        clock = Clock()
        admission = AdmissionControl(10, 10, clock)
        for _ in range(2):
            async with admission.admit(key(requests_per_minute=2), 1):
                clock.seconds += 20
        refused = await refusal(admission, key(requests_per_minute=2))
        assert (refused.scope, refused.retry_after_s, refused.status) == ("key", 20.0, 429)
        assert str(refused) == "this key may send 2 requests a minute: try again in 20 s"
        assert refused.headers == {"Retry-After": "20"}
        async with admission.admit(key("berta", requests_per_minute=2), 1):
            pass
        clock.seconds += refused.retry_after_s
        async with admission.admit(key(requests_per_minute=2), 1):
            pass

    run(test())


def test_tokens_are_reserved_and_then_count_as_used():
    async def test():
        clock = Clock()
        admission = AdmissionControl(10, 10, clock)
        who = key(tokens_per_minute=100)
        async with admission.admit(who, 80) as ticket:
            refused = await refusal(admission, who, 30)
            assert refused.retry_after_s == 60.0  # it is not known when the first one ends
            assert "100 tokens a minute and has 20 left; this request reserves 30" in str(refused)
            clock.seconds += 100
            assert (await refusal(admission, who, 30)).scope == "key"  # it still runs
            ticket.report_usage(50)
        async with admission.admit(who, 30) as ticket:
            ticket.report_usage(30)
        clock.seconds += 10
        assert (await refusal(admission, who, 30)).retry_after_s == 50.0
        clock.seconds += 50
        async with admission.admit(who, 100):
            pass
        assert (await refusal(admission, who, 1)).retry_after_s == 60.0  # without a report, all reserved tokens count

    run(test())


def test_a_used_up_key_can_be_checked_in_advance():
    async def test():
        admission = AdmissionControl(1, 10, Clock())
        who = key(requests_per_minute=1)
        admission.check_limits(None, 0)
        admission.check_limits(who, 0)
        admission.check_limits(who, 0)  # to look takes nothing
        await Visitor(who).start(admission).go()
        with pytest.raises(NotAdmitted, match="1 requests a minute"):
            admission.check_limits(who, 0)

    run(test())


def test_without_keys_only_the_queue_is_bounded():
    async def test():
        clock = Clock()
        admission = AdmissionControl(2, 1, clock)
        visitors = [Visitor(None).start(admission) for _ in range(3)]
        await settle()
        refused = await refusal(admission, None)
        assert refused.scope == "gateway"
        assert str(refused) == "the gateway is busy: 2 requests run and 1 wait; try again in 5 s"
        clock.seconds += 50
        for visitor in visitors:
            await visitor.go()
        assert (admission.running, admission.waiting) == (0, 0)

    run(test())


def test_a_request_waits_until_all_of_its_texts_fit():
    async def test():
        admission = AdmissionControl(4, 10, Clock())
        first, second = (Visitor(None, texts=2).start(admission) for _ in range(2))
        await settle()
        large, small = Visitor(None, texts=3).start(admission), Visitor(None).start(admission)
        await first.go()
        await settle()
        assert not large.entered.is_set()
        assert not small.entered.is_set()  # it does not pass
        await second.go()
        await settle()
        assert large.entered.is_set()
        assert small.entered.is_set()
        await large.go()
        await small.go()

    run(test())


def test_a_full_queue_of_one_key_yields_to_another_key():
    async def test():
        admission = AdmissionControl(1, 3, Clock())
        ann = [Visitor(key("ann")).start(admission) for _ in range(4)]
        await settle()
        berta = [Visitor(key("berta")).start(admission) for _ in range(2)]
        await settle()
        assert admission.waiting == 3
        assert isinstance(ann[3].task.exception(), NotAdmitted)  # the newest gave way
        assert isinstance(berta[1].task.exception(), NotAdmitted)  # both wait equally often now
        await ann[0].go()
        await settle()
        assert ann[1].entered.is_set()
        await ann[1].go()
        await settle()
        assert berta[0].entered.is_set()
        await berta[0].go()
        await ann[2].go()

    run(test())


def test_a_request_cancelled_when_admitted_passes_its_turn_on():
    async def test():
        admission = AdmissionControl(1, 3, Clock())
        first, second, third = (Visitor(None).start(admission) for _ in range(3))
        await settle()
        first.leave.set()
        while not first.task.done():
            await asyncio.sleep(0)
        second.task.cancel()
        await settle()
        assert second.task.cancelled()
        assert third.entered.is_set()
        await third.go()
        assert (admission.running, admission.waiting) == (0, 0)

    run(test())


def test_an_error_inside_of_the_context_frees_the_place():
    async def test():
        admission = AdmissionControl(1, 0, Clock())
        for _ in range(3):
            with pytest.raises(RuntimeError):
                async with admission.admit(key(concurrent=1), 1):
                    raise RuntimeError("broken")

    run(test())


LIMITS = {
    "ann": KeyLimits(requests_per_minute=4, tokens_per_minute=60, concurrent=3),
    "berta": KeyLimits(tokens_per_minute=30),
    "carl": FREE,
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(list(LIMITS)), st.integers(1, 30), st.integers(1, 4)),
        st.tuples(st.just("go"), st.integers(0, 30), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 40), st.just(0), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


@dataclass
class Seen:
    """A request and its times, as recorded by the test."""

    visitor: Visitor
    came: float
    left: float | None = None
    spent: int = 0


class World:
    """Requests that come, end and are cancelled, and the invariants that hold all the time."""

    CONCURRENT, QUEUE = 3, 4

    def __init__(self) -> None:
        self.clock = Clock()
        self.admission = AdmissionControl(self.CONCURRENT, self.QUEUE, self.clock)
        self.seen: list[Seen] = []

    async def step(self, what, which, number, texts=0) -> None:
        if what == "come":
            visitor = Visitor(ApiKey(which, LIMITS[which]), number, texts)
            self.seen.append(Seen(visitor.start(self.admission), self.clock()))
        elif what == "pass":
            self.clock.seconds += which
        elif self.seen:
            chosen = self.seen[which % len(self.seen)]
            visitor = chosen.visitor
            if what == "cancel":
                visitor.task.cancel()
            elif visitor.entered.is_set() and not visitor.task.done():
                chosen.spent = min(number, visitor.tokens)
                await visitor.go(chosen.spent)
        await settle()
        for one in self.seen:
            if one.left is None and one.visitor.task.done():
                one.left = self.clock()
                if one.visitor.entered.is_set() and one.visitor.use is None:
                    one.spent = one.visitor.tokens
        self.check()

    def taken(self, name) -> list[Seen]:
        """Requests of the key that were not refused."""
        return [s for s in self.seen if s.visitor.who.name == name and not self.refused(s)]

    @staticmethod
    def refused(one: Seen) -> bool:
        task = one.visitor.task
        return task.done() and not task.cancelled() and isinstance(task.exception(), NotAdmitted)

    def check(self) -> None:
        now = self.clock()
        running = [s for s in self.seen if s.visitor.entered.is_set() and not s.visitor.task.done()]
        waiting = [s for s in self.seen if not s.visitor.entered.is_set() and not s.visitor.task.done()]
        assert (self.admission.running, self.admission.waiting) == (len(running), len(waiting))
        texts = sum(min(s.visitor.texts, self.CONCURRENT) for s in running)
        assert texts <= self.CONCURRENT
        assert len(waiting) <= self.QUEUE
        # Nobody waits for nothing: the first one at least has no room.
        assert not waiting or texts + max(s.visitor.texts for s in waiting) > self.CONCURRENT
        for name, limits in LIMITS.items():
            taken = self.taken(name)
            if limits.requests_per_minute is not None:
                assert sum(s.came > now - WINDOW_S for s in taken) <= limits.requests_per_minute
            if limits.tokens_per_minute is not None:
                alive = [s for s in taken if s.left is None or s.left > now - WINDOW_S]
                assert sum(s.visitor.tokens if s.left is None else s.spent for s in alive) <= limits.tokens_per_minute
            if limits.concurrent is not None:
                assert sum(s.left is None for s in taken) <= limits.concurrent


@settings(max_examples=200)
@given(STEPS)
def test_no_limit_is_exceeded_and_every_request_gets_a_turn(steps):
    async def test():
        world = World()
        for step in steps:
            await world.step(*step)
        waiting = [s.visitor for s in world.seen if not s.visitor.task.done()]
        for _ in range(len(waiting)):
            running = next(number for number, s in enumerate(world.seen) if is_running(s))
            await world.step("go", running, 1)
        assert all(visitor.entered.is_set() for visitor in waiting)  # none starved
        assert (world.admission.running, world.admission.waiting) == (0, 0)
        for account in world.admission._usage.values():
            assert (account.open, account.reserved) == (0, 0)
            assert account.tokens.sum(world.clock() + WINDOW_S) == account.requests.sum(world.clock() + WINDOW_S) == 0

    run(test())


def is_running(one: Seen) -> bool:
    return one.visitor.entered.is_set() and not one.visitor.task.done()
