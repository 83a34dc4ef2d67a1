"""The laws of the scheduler, over any arrivals, on a clock that only counts iterations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.server.compute.scheduler import (
    LONG_BUDGET_SHARE,
    MAX_REMEMBERED_SESSIONS,
    MAX_YIELD_S,
    OVERDUE_AFTER_S,
    PRIORITY_AFTER_S,
    TOKENS_PER_YIELDING,
    TRAINING_PRIORITY_AFTER_S,
    FairShares,
    QueuedTokens,
    TokenSlice,
    next_batch,
)
from swarm.trust.points import CONTRIBUTOR_WEIGHT

HERE, THERE = Span(0, 4), Span(2, 4)
SPANS = (HERE, THERE, Span(3, 6), Span(5, 6), Span(6, 8))
ITERATION = 0.5
"""Seconds that each iteration takes."""


@dataclass
class Request:
    """Something to compute, until nothing is left of it."""

    session: str
    tokens: int
    peer: str = ""
    short: bool = False
    training: bool = False
    whole: bool = False
    span: Span = HERE
    urgent: bool = True
    cost: float = 1.0
    weight: float = 1.0
    number: int = -1
    since: float = 0.0

    def __post_init__(self) -> None:
        self.peer = self.peer or self.session


@dataclass
class Schedule:
    """What the engine does, without computing anything.

    Attributes:
        served: tokens for each session so far.
        iteration: seconds that each iteration takes.
        joins_parts: whether requests for overlapping blocks share iterations.
    """

    budget: int
    shares: FairShares = field(default_factory=FairShares)
    waiting: list[Request] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    trained: float = -math.inf
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))
    iteration: float = ITERATION
    joins_parts: bool = False

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.number, request.since = next(self.numbers), self.now
            self.waiting.append(request)

    def seen(self) -> list[QueuedTokens]:
        return [
            QueuedTokens(
                number=one.number,
                span=one.span,
                peer=one.peer,
                session=one.session,
                tokens=one.tokens,
                short=one.short,
                training=one.training,
                whole=one.whole,
                idle=self.now - (max(one.since, self.trained) if one.training else one.since),
                waited=self.now - one.since,
                urgent=one.urgent,
                joins_parts=self.joins_parts and not one.whole,
                token_cost=one.cost,
                weight=one.weight,
            )
            for one in self.waiting
        ]

    def iterate(self) -> list[tuple[Request, int]]:
        """Who gets how many tokens in the next iteration, which keeps the laws of every single one."""
        waiting = self.seen()
        batch = next_batch(waiting, self.shares, self.budget)
        assert next_batch(waiting, self.shares, self.budget) == batch
        self.shares.charge_batch(waiting, batch)
        chosen = self._checked(batch)
        for one, tokens in chosen:
            one.tokens -= tokens
            one.since, one.urgent = self.now, True
            self.served[one.session] += tokens
            if one.training:
                self.trained = self.now
        self.waiting = [one for one in self.waiting if one.tokens]
        self.now += self.iteration
        return chosen

    def _checked(self, batch: Sequence[TokenSlice]) -> list[tuple[Request, int]]:
        by_number = {one.number: one for one in self.waiting}
        chosen = [(by_number[portion.number], portion.tokens) for portion in batch]
        assert len({portion.number for portion in batch}) == len(batch)
        assert all(0 < tokens <= one.tokens for one, tokens in chosen)
        if any(one.whole for one, _ in chosen):
            assert [tokens for _, tokens in chosen] == [chosen[0][0].tokens]
            return chosen
        assert sum(tokens for _, tokens in chosen) <= self.budget
        assert bool(chosen) == bool(self.waiting)
        assert len({one.training for one, _ in chosen}) <= 1
        if chosen:
            together = self._in_one_pass(self._oldest(chosen[0][0].training))
            assert all(one in together for one, _ in chosen)
            # No room stays empty while a request for these blocks could use it, unless it lets others go first.
            behind = {one.number for one in together if self._may_yield(one)}
            used = sum(tokens for one, tokens in chosen if one.number not in behind)
            assert used == min(self.budget, sum(one.tokens for one in together if one.number not in behind))
            lazy = sum(one.tokens for one in together if one.number in behind)
            assert sum(tokens for _, tokens in chosen) - used == min(
                lazy, self.budget - used, used // TOKENS_PER_YIELDING
            )
        return chosen

    def _oldest(self, training: bool) -> Request:
        """The request that decides which blocks are computed."""
        ages = {
            one.number: one.weight * (one.waited if one.waited >= OVERDUE_AFTER_S else one.idle) for one in self.seen()
        }
        first = [one for one in self.waiting if one.training == training and not self._may_yield(one)]
        return max(first, key=lambda one: (ages[one.number], -one.number))

    def _in_one_pass(self, oldest: Request) -> list[Request]:
        """The requests that may be computed together with the oldest."""
        others = [one for one in self.waiting if one.training == oldest.training and not one.whole]
        if not self.joins_parts or oldest.whole:
            return [one for one in others if one.span == oldest.span]
        return [one for one in others if oldest.span.start <= one.span.start and one.span.end <= oldest.span.end]

    def _may_yield(self, one: Request) -> bool:
        others = any(other.short and other.urgent and other.training == one.training for other in self.waiting)
        return others and one.short and not one.urgent and self.now - one.since < MAX_YIELD_S


CUT = st.builds(
    Request,
    session=st.sampled_from(["a", "b", "c", "d"]),
    tokens=st.integers(1, 100),
    peer=st.sampled_from(["p", "q", "r"]),
    short=st.booleans(),
    training=st.booleans(),
    span=st.sampled_from(SPANS),
    urgent=st.booleans(),
    weight=st.sampled_from([1.0, CONTRIBUTOR_WEIGHT]),
)
WHOLE = st.builds(
    Request,
    session=st.sampled_from(["a", "b", "e"]),
    tokens=st.integers(1, 150),
    peer=st.sampled_from(["p", "s"]),
    training=st.just(True),
    whole=st.just(True),
    span=st.sampled_from([HERE, THERE]),
)
REQUESTS = CUT | WHOLE


@given(st.lists(st.lists(REQUESTS, max_size=4), max_size=15), st.integers(1, 200), st.booleans())
def test_every_iteration_keeps_the_laws_and_everything_is_computed_in_the_end(arrivals, budget, joins_parts):
    schedule = Schedule(budget, joins_parts=joins_parts)
    wanted = sum(one.tokens for batch in arrivals for one in batch)
    for batch in arrivals:
        schedule.add(*batch)
        schedule.iterate()
    iterations = 0
    while schedule.waiting:
        schedule.iterate()
        iterations += 1
    assert iterations <= wanted
    assert schedule.served.total() == wanted
    assert len(schedule.shares) == 0


CROWD = 20
"""Requests that wait at most before new ones come: clients that are not served give up."""


@given(st.lists(st.lists(REQUESTS, max_size=3), min_size=1, max_size=5), REQUESTS, st.integers(8, 150))
@settings(max_examples=60)
def test_nobody_waits_for_ever_whatever_else_comes(flood, one, budget):
    """The flood comes again and again, each time with sessions that were never seen before."""
    schedule = Schedule(budget)
    for number in range(10):
        _pour(schedule, flood, number)
        schedule.iterate()
    schedule.add(one)
    every = TRAINING_PRIORITY_AFTER_S / ITERATION + 2
    if one.training:  # in turn, an iteration now and then; sooner or later before all that came later
        bound = OVERDUE_AFTER_S / ITERATION + every * (
            2 + CROWD + sum(other.tokens for other in schedule.waiting if other.training)
        )
    else:  # each of those before it is served once at most, when all have lost their patience
        bound = 2 * CONTRIBUTOR_WEIGHT * (len(schedule.waiting) + PRIORITY_AFTER_S / ITERATION + every)
    left, iterations = one.tokens, 0
    while one.tokens == left:
        assert iterations <= bound, "it waits for ever"
        _pour(schedule, flood, 1000 + iterations, kept=one)
        schedule.iterate()
        iterations += 1


def _pour(schedule, flood, number, kept=None):
    if len(schedule.waiting) > CROWD:
        schedule.waiting = [one for one in schedule.waiting if one is kept or one.number % 2]
    for kind in flood[number % len(flood)]:
        session, peer = f"{number} {kind.session}", f"{number} {kind.peer}"
        schedule.add(
            Request(session, kind.tokens, peer, kind.short, kind.training, kind.whole, kind.span, weight=kind.weight)
        )


@pytest.mark.parametrize(("short", "budget"), [(False, 1), (True, 1), (False, 90), (True, 90)])
def test_points_buy_several_shares_and_nobody_is_left_out(short, budget):
    """Where all that can be computed is wanted, a session with points gets eight times what one without gets."""
    schedule = Schedule(budget, iteration=0.02)
    for _ in range(300):
        for session, weight in (("points", CONTRIBUTOR_WEIGHT), ("none", 1.0)):
            while sum(one.session == session for one in schedule.waiting) < 2:
                schedule.add(Request(session, budget, short=short, weight=weight))
        schedule.iterate()
    assert schedule.served["points"] / schedule.served["none"] == pytest.approx(CONTRIBUTOR_WEIGHT, rel=0.15)


@pytest.mark.parametrize(("short", "budget"), [(False, 1), (True, 1), (True, 64)])
def test_a_session_that_has_had_much_is_not_starved_by_new_ones(short, budget):
    schedule = Schedule(budget)
    schedule.add(Request("old", 500))
    while schedule.waiting:
        schedule.iterate()
    old = Request("old", 10, short=short)
    schedule.add(old)
    for number in range(100):
        schedule.add(*(Request(f"{number} {other}", budget, peer="crowd", short=short) for other in range(2)))
        schedule.iterate()
        if old.tokens < 10:
            break
    assert number <= PRIORITY_AFTER_S / ITERATION + 5


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=20),
    st.lists(st.integers(17, 5000), max_size=20),
    st.integers(0, 200),
)
def test_short_requests_go_into_the_very_next_iteration_whatever_prompts_wait(shorts, longs, behind):
    budget = 500
    schedule = Schedule(budget)
    schedule.add(*(Request(f"long {n}", tokens, peer="prompts") for n, tokens in enumerate(longs)))
    for _ in range(behind % 7):
        schedule.iterate()
    short = [Request(f"short {n}", tokens, short=True) for n, tokens in enumerate(shorts)]
    schedule.add(*short)
    chosen = schedule.iterate()
    assert sum(shorts) <= budget * (1 - LONG_BUDGET_SHARE)
    assert all(one.tokens == 0 for one in short)
    taken = sum(tokens for one, tokens in chosen if not one.short)
    assert taken == min(budget - sum(shorts), taken + sum(one.tokens for one in schedule.waiting))


SHORT = st.builds(
    Request,
    session=st.uuids().map(str),
    tokens=st.integers(1, 20),
    peer=st.sampled_from(["p", "q", "r"]),
    short=st.just(True),
    span=st.sampled_from([HERE, THERE]),
    urgent=st.booleans(),
)


@given(st.lists(SHORT, max_size=20), st.integers(1, 10), st.integers(0, 5))
def test_an_urgent_step_does_not_wait_behind_those_that_are_not(others, tokens, earlier):
    """Whatever came before it, and for whichever blocks: it is in the very next iteration, nearly alone."""
    schedule = Schedule(10_000, iteration=MAX_YIELD_S / 10)
    schedule.add(*(replace(one, urgent=False) for one in others))
    for _ in range(earlier):
        schedule.add(Request(f"before {schedule.now}", 1, short=True), Request("more", 3, short=True, urgent=False))
        schedule.iterate()
    assert sum(one.session == "more" for one in schedule.waiting) == earlier
    urgent = Request("urgent", tokens, short=True)
    schedule.add(urgent)
    chosen = schedule.iterate()
    assert urgent.tokens == 0
    along = sum(tokens for one, tokens in chosen if one is not urgent)
    assert along <= tokens // TOKENS_PER_YIELDING


def test_beside_short_iterations_the_bound_is_exact():
    schedule = Schedule(64, iteration=0.004)
    schedule.add(Request("lazy", 1, short=True, urgent=False))
    while "lazy" not in schedule.served:
        schedule.add(Request("urgent", 1, short=True))
        schedule.iterate()
    assert MAX_YIELD_S <= schedule.now - schedule.iteration < MAX_YIELD_S + 2 * schedule.iteration


def test_prompts_go_on_however_many_short_requests_wait():
    schedule = Schedule(100)
    schedule.add(Request("prompt", 250))
    iterations = 0
    while schedule.served["prompt"] < 250:
        schedule.add(*(Request(f"{iterations} {n}", 16, short=True) for n in range(20)))
        schedule.iterate()
        iterations += 1
    assert iterations == 250 / (100 * LONG_BUDGET_SHARE)


def test_inference_goes_before_training_which_gets_an_iteration_now_and_then():
    """However many wait to train: only the time since any of them was served counts."""
    schedule = Schedule(64)
    schedule.add(*(Request(f"trainer {n}", 1000, peer=f"p{n % 3}", training=True) for n in range(30)))
    schedule.add(Request("writer", 1))
    kinds = []
    for number in range(400):
        if not any(one.session == "writer" for one in schedule.waiting):
            schedule.add(Request("writer", 1, short=True))
        chosen = schedule.iterate()
        kinds.append(chosen[0][0].training)
        if number == 0:
            assert kinds == [False]
    every = TRAINING_PRIORITY_AFTER_S / ITERATION
    assert 400 / (every + 2) <= sum(kinds) <= 400 / every + 1
    assert not any(first and second for first, second in itertools.pairwise(kinds))


def test_a_backward_waits_for_inference_and_is_computed_in_one_piece():
    schedule = Schedule(budget=64)
    schedule.add(Request("trainer", 640, training=True, whole=True), Request("reader", 100))
    names = [[(one.session, tokens) for one, tokens in schedule.iterate()] for _ in range(3)]
    assert names == [[("reader", 64)], [("reader", 36)], [("trainer", 640)]]


def test_backwards_and_forwards_of_two_peers_share_what_training_gets():
    """Tokens are charged at what they cost. Clients have several portions under way."""
    schedule = Schedule(budget=64)
    for _ in range(400):
        for name, tokens, whole in (("backward", 300, True), ("forward", 100, False)):
            while sum(one.session == name for one in schedule.waiting) < 2:
                schedule.add(Request(name, tokens, training=True, whole=whole))
        schedule.iterate()
    assert abs(schedule.served["backward"] - schedule.served["forward"]) <= 300


@pytest.mark.parametrize(("same_peer", "training"), [(False, True), (True, False)])
def test_two_sessions_that_always_have_work_get_equally_much(same_peer, training):
    schedule = Schedule(64)
    for name in "ab":
        schedule.add(Request(name, 100_000, "peer" if same_peer else name, training=training))
    for _ in range(100):
        schedule.iterate()
        assert abs(schedule.served["a"] - schedule.served["b"]) <= 64
    assert schedule.served.total() == 6400


def test_fair_is_counted_in_blocks():
    """A session of half of the blocks gets twice as many tokens."""
    schedule = Schedule(64, joins_parts=True, iteration=0.1)
    schedule.add(Request("whole", 100_000, "peer", cost=4.0), Request("part", 100_000, "peer", span=THERE, cost=2.0))
    for _ in range(99):
        schedule.iterate()
    assert abs(schedule.served["part"] - 2 * schedule.served["whole"]) <= 3 * 64


def test_requests_for_overlapping_blocks_share_an_iteration():
    def first_iteration(*requests: Request) -> set[str]:
        schedule = Schedule(64, joins_parts=True)
        schedule.add(*map(replace, requests))
        return {one.session for one, _ in schedule.iterate()}

    head, tail = Request("head", 1, short=True, span=Span(0, 2)), Request("tail", 1, short=True, span=Span(2, 4))
    whole, behind = Request("whole", 1, short=True, span=HERE), Request("behind", 1, short=True, span=Span(4, 6))
    assert first_iteration(head, tail) == {"head"}
    assert first_iteration(whole, head, tail, behind) == {"head", "tail", "whole"}
    # What is not urgent goes along where blocks are computed anyway, and nowhere else.
    lazy = replace(tail, session="lazy", urgent=False)
    assert first_iteration(whole, head, lazy) == {"head", "whole", "lazy"}
    assert first_iteration(head, replace(head, session="other"), lazy) == {"head", "other"}


def test_many_sessions_of_one_peer_get_together_what_one_session_of_another_gets():
    schedule = Schedule(100)
    schedule.add(*(Request(f"many {n}", 10_000, peer="greedy") for n in range(10)))
    schedule.add(Request("one", 10_000, peer="modest"))
    for _ in range(60):
        schedule.iterate()
    assert schedule.served["one"] == 60 * 50
    many = [schedule.served[f"many {n}"] for n in range(10)]
    assert sum(many) == 60 * 50
    assert max(many) - min(many) <= 100


def test_a_session_that_was_idle_does_not_save_up():
    """Not even while another one that needs little comes again and again."""
    schedule = Schedule(64)
    schedule.add(Request("busy", 100_000, peer="peer"), Request("idle", 64, peer="peer"))
    for _ in range(200):
        schedule.add(Request("writer", 1, short=True))
        schedule.iterate()
    assert schedule.served["idle"] == 64
    schedule.add(Request("idle", 100_000, peer="peer"))
    before = Counter(schedule.served)
    for _ in range(20):
        schedule.add(Request("writer", 1, short=True))
        schedule.iterate()
        gained = schedule.served - before
        assert abs(gained["idle"] - gained["busy"]) <= 64


@pytest.mark.parametrize(("overlap", "training"), [(False, True), (True, False)])
def test_shares_do_not_grow_with_the_sessions_that_come_and_go(training, overlap):
    schedule = Schedule(64)
    if overlap:
        schedule.add(Request("patient", 10**9, training=training))
    for number in range(2 * MAX_REMEMBERED_SESSIONS):
        schedule.add(*(Request(f"{number} {n}", 70, peer="crowd", training=training) for n in range(1 + overlap)))
        schedule.iterate()
        if len(schedule.waiting) > 10:  # their clients have given up
            del schedule.waiting[1:8]
        assert len(schedule.shares) <= MAX_REMEMBERED_SESSIONS + 12
