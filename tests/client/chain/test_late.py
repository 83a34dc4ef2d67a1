"""Servers that are late, or slow all the time: when others are asked, and who goes on."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.late import (
    ASKED_SHARE,
    MAX_ALLOWANCE,
    MAX_SLOWNESS,
    Alarm,
    AskAllowance,
    common_slowness,
    first_late,
    is_worth_leaving,
    none_late_before,
)
from swarm.client.hops.hop_progress import NO_STEP, HopClock
from swarm.client.routes.events import HopLost, Recovered
from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.data_structures import StepLayout
from swarm.errors import PeerLost
from swarm.protocol import messages
from tests import virtual_time
from tests.client.chains import NAMES, TWICE, Conversation, Swarm, disturb, now

run = partial(disturb, measured=10)
"""Disturbs a session of which it is known how long its steps take."""


async def slow_for(swarm: Swarm, name: str, seconds: float) -> None:
    """Make a server take so long for each step from now on."""
    swarm.servers[name].runtime._seconds = seconds


def count(swarm: Swarm, kind: type) -> int:
    return sum(isinstance(event, kind) for event in swarm.events)


@pytest.mark.parametrize(("name", "push"), [("b", False), ("c", True)])
def test_the_late_one_may_be_first_and_stays(span_model, name, push):
    """It is late by a little more than what asking costs; the others are slower still."""

    async def act(swarm, talk):
        await slow_for(swarm, name, 0.6)
        await slow_for(swarm, name + "2", 3.0)
        await talk.append(1, 1)
        assert swarm.servers[name + "2"].count(messages.OpenSession) > 0
        assert swarm.planner.overtaken == []
        assert swarm.planner.failures == []
        assert name in {hop.peer_id for hop in talk.chain._hops.hops}
        await slow_for(swarm, name, 0.01)

    run(span_model, act, push=push)


@pytest.mark.parametrize("name", ["b"])
def test_one_that_answers_in_the_end_was_slow_and_is_not_reported(span_model, name):
    async def act(swarm, talk):
        await slow_for(swarm, name, 1.9)
        began = now()
        await talk.append(1, 1)
        assert now() - began < 1
        assert set(swarm.planner.overtaken) == {name}
        await asyncio.sleep(30)
        assert swarm.planner.failures == []
        assert count(swarm, HopLost) == count(swarm, Recovered) == 1
        assert name not in {hop.peer_id for hop in talk.chain._hops.hops}
        assert len(swarm.servers[name].sessions) == 0

    run(span_model, act)


@pytest.mark.parametrize(("name", "push"), [("a", True), ("b", False)])
def test_a_prompt_at_a_server_that_hangs(span_model, name, push):
    async def act(swarm, talk):
        await talk.prefill((1, 2), (2, 1), (1, 2))
        swarm.hub.hang(name)
        began = now()
        await talk.prefill((1, 2), (2, 1), (1, 2))
        assert now() - began < 2
        assert set(swarm.planner.overtaken) == {name}

    run(span_model, act, push=push)


@pytest.mark.parametrize("name", ["b"])
def test_rows_that_are_copied_at_a_server_that_hangs(span_model, name):
    async def act(swarm, talk):
        swarm.hub.hang(name)
        lengths = talk.lengths
        await talk.step(StepLayout((lengths[1], lengths[0], lengths[0]), (1, 1, 1), (1, 0, 0)))
        assert set(swarm.planner.overtaken) == {name}
        await talk.step(StepLayout((4, lengths[0] + 1), (1, 2), (2, 1)))

    run(span_model, act)


@pytest.mark.parametrize("name", ["a", "c"])
def test_steps_that_are_under_way_at_a_server_that_hangs(span_model, name):
    async def act(swarm, talk):
        swarm.hub.hang(name)
        began = now()
        lengths = talk.lengths
        steps = [
            await talk.begin_step(StepLayout(tuple(length + ahead for length in lengths), (1, 1))) for ahead in range(4)
        ]
        await talk.chain.wait(lambda: talk.chain.outputs(steps[-1], 6) is not None)
        assert now() - began < 2
        for number in steps:
            talk.chain.settle(number)
        assert set(swarm.planner.overtaken) == {name}

    run(span_model, act)


@pytest.mark.parametrize("kind", [messages.OpenSession, messages.ReplayRequest, messages.StepRequest])
def test_the_others_die_while_they_are_asked(span_model, kind):
    async def act(swarm, talk):
        swarm.hub.hang("b")

        def watch(source: str, target: str, message: messages.Message) -> bool:
            if isinstance(message, kind) and target == "b2" and not len(swarm.planner.failures):
                swarm.kill("b2")
                asyncio.get_running_loop().call_later(8, asyncio.ensure_future, swarm.add("b2", 2, 4))
            return False

        swarm.on_message = watch
        await talk.append(1, 1)
        assert ("b2", PeerLost) in [(peer, type(error)) for peer, error in swarm.planner.failures]

    run(span_model, act)


@pytest.mark.parametrize("at", [0.1, 0.3])
def test_the_late_one_dies_while_the_others_are_asked(span_model, at):
    async def act(swarm, talk):
        swarm.hub.hang("b")
        asyncio.get_running_loop().call_later(at, swarm.kill, "b")
        began = now()
        await talk.append(1, 1)
        assert now() - began < 1
        assert swarm.servers["b2"].count(messages.OpenSession) == 1

    run(span_model, act)


@pytest.mark.parametrize("at", [0.1, 0.3])
@pytest.mark.parametrize("how", ["interrupt", "close"])
def test_whatever_ends_the_step_frees_the_others(span_model, how, at):
    async def act(swarm, talk):
        swarm.hub.hang("b")
        step = asyncio.ensure_future(talk.append(1, 1))
        await asyncio.wait({step}, timeout=at)
        step.cancel()
        await asyncio.wait({step})
        if how == "close":
            await talk.chain.close()
            await asyncio.sleep(5)
            assert len(swarm.servers["b2"].sessions) == 0
            return
        await talk.append(1, 1)

    async def alone() -> None:
        swarm = Swarm(span_model, TWICE)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(1, 1)
        await act(swarm, talk)

    if how == "close":
        virtual_time.run(alone)
    else:
        run(span_model, act)


@pytest.mark.parametrize("name", ["b"])
def test_a_server_that_is_slow_all_the_time_is_left_and_new_sessions_avoid_it(span_model, name):
    async def act(swarm, talk):
        talk.chain._hops.standbys.allowance.take()  # so that it has the time to be slow
        await slow_for(swarm, name, 2.0)
        began = now()
        for _ in range(25):
            await talk.append(1, 1)
        assert now() - began < 20 * 2.0
        assert swarm.planner.failures == []
        assert name not in {hop.peer_id for hop in talk.chain._hops.hops}
        another = await swarm.chain()
        assert name not in {hop.peer_id for hop in another.chain._hops.hops}
        await another.chain.close()

    run(span_model, act)


def test_a_machine_that_is_busy_bans_nobody_and_asks_rarely(span_model):
    """All servers are slow alike, more and more, and then quick again."""

    async def act(swarm, talk: Conversation):
        steps = 0
        for seconds in (0.05, 0.2, 0.4, 0.8, 0.3, 0.01):
            for name in swarm.servers:
                await slow_for(swarm, name, seconds)
            for _ in range(5):
                await talk.append(1, 1)
                steps += 1
        assert swarm.planner.failures == []
        assert len(swarm.planner.overtaken) <= 1
        asked = sum(swarm.servers[name + "2"].count(messages.OpenSession) for name in NAMES)
        assert asked <= 2

    run(span_model, act)


def test_it_is_this_client_that_stood_still(span_model, monkeypatch):
    async def act(swarm, talk):
        loop = asyncio.get_running_loop()
        # The clock jumps while the step is under way, as if the client's machine had been asleep.
        loop.call_later(0.03, lambda: setattr(loop._jumping, "now", loop._jumping.now + 60.0))
        await talk.append(1, 1)
        assert swarm.planner.failures == []
        assert swarm.planner.overtaken == []

    run(span_model, act)


seconds = st.floats(1e-4, 10.0)


@dataclass
class Hop:
    clock: HopClock
    awaited: int | None = None
    asked: int = NO_STEP
    replied: int = 9


def hop(usual: float, last: float | None = None, handed: float | None = None, **changes: int) -> Hop:
    """A server that takes `usual` seconds a step, took `last` for the last one, and has been handed step 10."""
    clock = HopClock(TimeoutEstimator(usual, usual, 60.0))
    times = [usual] * 60 + ([last] if last is not None else [])
    for number, took in enumerate(times):
        clock.on_handed(number, number, 1, 0.0)
        clock.on_reply(number, 1, took, False, took)
    if handed is None:
        return Hop(clock, None, **changes)
    clock.on_handed(10, 10, 1, handed)
    return Hop(clock, 10, **changes)


def test_nobody_is_asked_while_nothing_is_awaited():
    assert first_late([hop(0.1), hop(0.1)], [1.0, 1.0]) is None


def test_others_are_asked_after_the_usual_time_and_what_asking_costs():
    found = first_late([hop(0.1), hop(0.1, handed=5.0)], [1.0, 0.25])
    assert (found.index, found.number) == (1, 10)
    assert found.time == pytest.approx(5.0 + 0.1 + 0.25, rel=1e-3)


def test_nobody_is_asked_twice_for_a_step_or_for_one_that_came_through():
    assert first_late([hop(0.1, handed=5.0, asked=10)], [1.0]) is None
    assert first_late([hop(0.1, handed=5.0), hop(0.1, replied=10)], [1.0, 1.0]) is None
    assert first_late([hop(0.1, handed=5.0), hop(0.1, replied=9)], [1.0, 1.0]) is not None


def test_the_first_to_be_late_is_asked_about_first():
    route = [hop(1.0, handed=5.0), hop(0.1, handed=5.0), hop(0.1, handed=5.0)]
    assert first_late(route, [0.0, 0.2, 0.1]).index == 2


@given(st.lists(st.tuples(seconds, seconds, st.none() | seconds), min_size=1, max_size=4), st.floats(0.0, 10.0))
def test_nothing_is_late_before_the_usual_time_has_passed(times, refill):
    route = [hop(usual, last, handed) for usual, last, handed in times]
    late = first_late(route, [refill] * len(route))
    assert late is None or late.time >= none_late_before(route)


@given(seconds, seconds, st.floats(1.0, 6.0))
def test_a_machine_that_is_busy_gets_as_much_longer_as_all_others_take(usual, other, slower):
    calm = first_late([hop(usual, handed=0.0), hop(other)], [0.0, 0.0])
    busy = first_late([hop(usual, handed=0.0), hop(other, other * slower)], [0.0, 0.0])
    assert busy.time == pytest.approx(slower * calm.time, rel=1e-2)


@given(st.lists(seconds, min_size=1, max_size=5), st.data())
def test_one_server_that_is_as_quick_as_usual_excuses_nobody(times, data):
    route = [hop(time, 100 * time) for time in times]
    assert 1 <= common_slowness(route, 0) <= MAX_SLOWNESS
    assert common_slowness([*route, hop(1.0)], data.draw(st.integers(0, len(times) - 1))) == pytest.approx(1, rel=1e-3)


@given(st.lists(st.booleans(), max_size=400))
def test_a_session_asks_for_few_of_its_steps(late):
    allowance, asked = AskAllowance(), 0
    for number, is_late in enumerate(late, 1):
        asked += is_late and allowance.take()
        allowance.on_answered()
        assert asked <= 1 + ASKED_SHARE * number


def test_an_allowance_is_not_saved_up():
    allowance = AskAllowance()
    for _ in range(10_000):
        allowance.on_answered()
    assert sum(allowance.take() for _ in range(100)) == MAX_ALLOWANCE


@given(seconds, seconds, st.integers(0, 1000), seconds)
def test_a_server_is_left_only_when_it_has_cost_as_much_as_that_does(here, elsewhere, steps, refill):
    if is_worth_leaving(here, elsewhere, steps, refill):
        assert here >= 2 * elsewhere * (1 - 1e-9)
        assert steps * (here - elsewhere) >= refill
    assert not is_worth_leaving(here, here, steps, refill)


def test_a_drip_is_left():
    assert is_worth_leaving(2.0, 0.01, 8, 1.0)
    assert not is_worth_leaving(2.0, 0.01, 8, 100.0)


def rings(*changes) -> list[float]:
    """When an alarm rings that is started for 2 s from now, after some changes, each with its time."""
    times: list[float] = []

    async def scenario():
        began, alarm = time.perf_counter(), Alarm()
        alarm.start(began + 2, lambda: times.append(round(time.perf_counter() - began, 3)))
        for at, change in changes:
            await asyncio.sleep(began + at - time.perf_counter())
            change(alarm, began)
        await asyncio.sleep(100)

    virtual_time.run(scenario)
    return times


def move(to: float):
    return lambda alarm, began: alarm.move(began + to)


def stop(alarm: Alarm, began: float) -> None:
    alarm.stop()


def test_it_rings_once_at_the_time_that_was_named_last():
    assert rings() == [2]
    assert rings((1, move(5))) == [5]
    assert rings((1, move(1.5))) == [1.5]
    assert rings((1, move(5)), (4, move(9))) == [9]


def test_an_infinite_time_never_comes():
    assert rings((1, move(math.inf))) == []
    assert rings((1, move(math.inf)), (4, move(9))) == [9]


def test_it_does_not_ring_once_it_is_stopped():
    assert rings((1, stop)) == []
    assert rings((1, stop), (1, move(5))) == []
