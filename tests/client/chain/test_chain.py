"""A session over all hops, with real handlers: the ordinary way of a step, and what the person does to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
import torch

from swarm.client.chain import chain
from swarm.client.chain.next_action import Deliver, Finished, WaitUntil, next_action
from swarm.client.hops import blame
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import NotFinite, SessionClosed, TooLong
from swarm.protocol import messages
from tests import virtual_time
from tests.client.chains import CLIENT, HIDDEN, MAX_LENGTH, ONCE, Swarm, converse, now

DELAY, COMPUTE = 0.01, 0.01


@pytest.mark.parametrize("push", [True, False])
def test_outputs_and_the_time_that_a_token_takes(span_model, push):
    """N + 1 delays where servers push to each other, 2 N where they do not."""

    async def scenario(swarm, talk):
        assert talk.chain.timings == ()
        await talk.append(3, 5)
        for _ in range(5):
            began = now()
            await talk.append(1, 1)
            assert now() - began == pytest.approx((4 if push else 6) * DELAY + 3 * COMPUTE)
        assert [timing.total > 0 for timing in talk.chain.timings] == [True] * 3
        assert [server.runtime.jobs for server in swarm.servers.values()] == [6, 6, 6]
        by_client = [server.count(messages.StepRequest) for server in swarm.servers.values()]
        # The first output is pushed before the second server can know its neighbors; all others go straight.
        assert by_client == [6, 0, 0] if push else [6, 6, 6]
        assert str(talk.chain.route) == "route: 0:2 …a → 2:4 …b → 4:6 …c"
        assert swarm.planner.failures == []

    converse(span_model, scenario, push=push)


@pytest.mark.parametrize("push", [True, False])
def test_a_token_that_servers_pass_on_is_looked_at_only_as_it_sets_out_and_comes_back(span_model, push, monkeypatch):
    actions = []

    def look(*args, **options):
        actions.append(next_action(*args, **options))
        return actions[-1]

    monkeypatch.setattr(chain, "next_action", look)

    async def scenario(swarm, talk):
        await talk.append(3)
        for _ in range(5):
            await talk.append(1)
        actions.clear()
        await talk.append(1)
        kinds = [type(action) for action in actions]
        assert kinds == [Deliver, WaitUntil] * (1 if push else 3) + [Finished]

    converse(span_model, scenario, push=push)


@pytest.mark.parametrize("wire", [WireFormat.BLOCKWISE8])
def test_replies_come_in_the_format_that_was_asked_for_and_are_passed_on_as_they_are(span_model, wire):
    async def scenario():
        swarm = Swarm(span_model, ONCE, wire=wire)
        passed = []
        swarm.on_message = lambda source, target, message: passed.append(message) is not None
        await swarm.start()
        talk = await swarm.chain()
        hidden = PackedHidden(torch.zeros(2, HIDDEN).numpy().tobytes(), 2, HIDDEN, WireFormat.NONE, "float32")
        result = await talk.chain.step(hidden, StepLayout((0,), (2,)))
        assert (result.wire, result.tokens, result.hidden_size) == (wire, 2, HIDDEN)
        pushed = [message.step.format for message in passed if isinstance(message, messages.PushRequest)]
        assert pushed == [wire, wire]

    virtual_time.run(scenario)


def test_rows_come_and_go_and_are_copied(span_model):
    async def scenario(swarm, talk):
        await talk.append(3)
        await talk.step(StepLayout((3, 3, 3), (1, 1, 1), (0, 0, 0)))
        await talk.step(StepLayout((4, 4, 4), (1, 1, 1), (2, 0, 2)))
        await talk.step(StepLayout((2, 5), (2, 0)))
        await talk.step(StepLayout((0,), (4,)))

    converse(span_model, scenario)


def test_closing_frees_the_session_everywhere(span_model):
    async def scenario(swarm, talk):
        await talk.append(2)
        assert [len(server.sessions) for server in swarm.servers.values()] == [1, 1, 1]
        await talk.chain.close()
        await talk.chain.close()
        await asyncio.sleep(1)
        assert [len(server.sessions) for server in swarm.servers.values()] == [0, 0, 0]
        assert not swarm.hub.tasks
        with pytest.raises(SessionClosed):
            await talk.append(1)

    converse(span_model, scenario)


def test_closing_ends_the_comparison_of_large_inputs(span_model, monkeypatch):
    begun: list[bool] = []

    async def slowly(work, *args):
        begun.append(True)
        await asyncio.sleep(1)
        return work(*args)

    monkeypatch.setattr(blame, "MAX_INLINE_BYTES", 0)
    monkeypatch.setattr(blame.asyncio, "to_thread", slowly)

    async def scenario(swarm, talk):
        await talk.append(3)
        await asyncio.sleep(0.1)
        before = len(begun)
        await talk.chain.close()
        await asyncio.sleep(0.1)
        assert len(begun) == before > 0

    converse(span_model, scenario)


@pytest.mark.parametrize("push", [True, False])
def test_a_step_refused_by_the_clients_own_fault_leaves_the_session_usable(span_model, push):
    async def scenario(swarm, talk):
        await talk.append(3)
        with pytest.raises(TooLong, match=f"opened for {MAX_LENGTH}"):
            await talk.append(MAX_LENGTH)
        await talk.append(1)
        nan = PackedHidden(b"\xff" * 4 * HIDDEN, 1, HIDDEN, WireFormat.NONE, "float32")
        with pytest.raises(NotFinite, match="NaN"):
            await talk.chain.step(nan, StepLayout((4,), (1,)))
        await talk.append(1)
        assert swarm.planner.failures == []
        assert [server.count(messages.OpenSession) for server in swarm.servers.values()] == [1, 1, 1]

    converse(span_model, scenario, push=push)


COPIES = [
    pytest.param(None, None, id="no copies"),
    pytest.param((1, 0), (1, 0), id="copies, asked again"),
    pytest.param((1, 1), (0, 0), id="copies, then others"),
    pytest.param((1, 0), None, id="copies, then none"),
    pytest.param(None, (1, 0), id="copies only in the end"),
]


@pytest.mark.parametrize(("sources", "then"), COPIES)
@pytest.mark.parametrize(("push", "times"), [(True, 2), (False, 1)])
def test_interrupted_steps_are_never_built_upon(span_model, sources, then, push, times):
    """As when somebody presses Ctrl-C in a notebook at any moment, and then goes on in the same session."""
    took = {True: 4 * DELAY + 3 * COMPUTE, False: 6 * DELAY + 3 * COMPUTE}[push]

    async def interrupted_after(seconds):
        swarm = Swarm(span_model, ONCE, push=push)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(3, 5)
        for _ in range(times):
            step = asyncio.ensure_future(talk.step(StepLayout((2, 3), (1, 2), sources)))
            await asyncio.wait({step}, timeout=seconds)
            assert not step.done()
            step.cancel()
            with suppress(asyncio.CancelledError):
                await step
        await talk.step(StepLayout((2, 2), (2, 1), then))
        await talk.append(1, 1)
        assert swarm.planner.failures == []
        assert [server.count(messages.OpenSession) for server in swarm.servers.values()] == [1, 1, 1]

    for part in range(6):
        virtual_time.run(lambda part=part: interrupted_after(took * part / 6))


def test_a_push_of_a_step_that_was_given_up_may_come_late(span_model):
    """Even when the cache that it would spoil has been filled anew."""

    async def scenario(swarm, talk):
        await talk.append(3, 5)
        swarm.hub.delay = lambda source, target: 0.5 if (source, target) == ("a", "b") else DELAY
        layout = StepLayout((3, 3), (1, 1), (1, 0))
        step = asyncio.ensure_future(talk.step(layout))
        await asyncio.sleep(3 * DELAY)  # pushed, but not there yet
        step.cancel()
        await asyncio.wait({step})
        await talk.step(layout)
        await talk.step(StepLayout((2, 4), (1, 1)))
        assert swarm.planner.failures == []

    converse(span_model, scenario)


def test_a_step_keeps_a_copy_of_what_the_caller_may_change(span_model):
    async def scenario(swarm, talk):
        buffer = bytearray(torch.ones(1, HIDDEN).numpy().tobytes())
        layout = StepLayout((0,), (1,))
        first = await talk.chain.step(PackedHidden(memoryview(buffer), 1, HIDDEN, WireFormat.NONE, "float32"), layout)
        buffer[:] = bytes(len(buffer))
        await swarm.add("a2", 0, 2)
        swarm.kill("a")
        second = PackedHidden(torch.ones(1, HIDDEN).numpy().tobytes(), 1, HIDDEN, WireFormat.NONE, "float32")
        again = await talk.chain.step(second, StepLayout((1,), (1,)))
        both = span_model.forward(torch.ones(1, 2, HIDDEN))[0]
        for got, expected in zip((first, again), both, strict=True):
            values = torch.frombuffer(bytearray(got.payload), dtype=torch.float32)
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)

    converse(span_model, scenario)


@pytest.mark.parametrize("push", [True, False])
def test_chunks_of_a_prompt_keep_all_servers_at_work(span_model, push):
    """m chunks through h servers take m + h - 1 computations, not m h."""

    async def scenario(swarm, talk):
        await talk.append(3, 5)
        await asyncio.sleep(1)
        began = now()
        await talk.prefill((2, 1), (0, 2), (3, 0), (1, 1), (1, 0), (2, 2))
        assert now() - began == pytest.approx((4 if push else 6) * DELAY + (6 + 3 - 1) * COMPUTE)
        assert [server.runtime.jobs for server in swarm.servers.values()] == [7, 7, 7]
        by_client = [server.count(messages.StepRequest) for server in swarm.servers.values()]
        assert by_client == ([7, 0, 0] if push else [7, 7, 7])
        assert [round(timing.compute, 3) >= 0 for timing in talk.chain.timings] == [True] * 3
        await talk.append(1, 1)
        assert swarm.planner.failures == []

    converse(span_model, scenario, push=push)


@pytest.mark.parametrize("push", [True, False])
def test_a_server_is_handed_no_more_than_a_window(span_model, push, monkeypatch):
    async def scenario():
        monkeypatch.setattr("swarm.client.chain.chain.max_chunks_in_flight", lambda tokens: 2)
        swarm = Swarm(span_model, ONCE, push=push)
        unanswered, most = Counter(), Counter()

        def watch(source, target, message):
            if source == CLIENT and isinstance(message, messages.StepRequest):
                unanswered[target] += 1
                most[target] = max(most[target], unanswered[target])
            elif target == CLIENT and isinstance(message, messages.StepReply) and unanswered[source]:
                unanswered[source] -= 1
            return False

        swarm.on_message = watch
        await swarm.start()
        talk = await swarm.chain()
        await talk.prefill(*[(1, 2)] * 8)
        assert most == ({"a": 2} if push else {"a": 2, "b": 2, "c": 2})

    virtual_time.run(scenario)


def test_only_steps_that_continue_each_other_may_be_under_way_at_once(span_model):
    async def scenario(swarm, talk):
        copying, nothing = StepLayout((0,), (2,), (0,)), PackedHidden(b"", 0, HIDDEN, WireFormat.NONE, "float32")
        with pytest.raises(ValueError, match="cannot be under way together"):
            await talk.chain.steps([(nothing, copying), (nothing, StepLayout((2,), (1,)))])
        with pytest.raises(ValueError, match="cannot be under way together"):
            await talk.chain.begin(nothing, copying)
        await talk.append(4)
        assert talk.chain.appends(StepLayout((4,), (2,)))
        assert not talk.chain.appends(StepLayout((3,), (2,)))
        assert not talk.chain.appends(StepLayout((4,), (2,), (0,)))
        await talk.prefill((2,), (1,))

    converse(span_model, scenario)


def test_a_chunk_that_is_refused_by_the_clients_own_fault_gives_up_those_behind_it(span_model):
    async def scenario(swarm, talk):
        await talk.append(3)
        with pytest.raises(TooLong, match=f"opened for {MAX_LENGTH}"):
            await talk.prefill((20,), (20,), (30,), (2,), (2,))
        assert not talk.chain.appends(StepLayout((3,), (1,)))  # somebody may have more
        await talk.append(1)
        await talk.prefill((20,), (20,), (2,))
        assert swarm.planner.failures == []
        assert [server.count(messages.OpenSession) for server in swarm.servers.values()] == [1, 1, 1]

    converse(span_model, scenario)


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize(
    "then",
    [
        [StepLayout((3, 5), (1, 1))],
        [StepLayout((2, 2), (2, 1))],
        [StepLayout((5, 3), (1, 1), (1, 0))],
        [StepLayout((3, 4), (1, 1)), StepLayout((4, 5), (2, 1)), StepLayout((6, 6), (1, 1))],
    ],
)
def test_interrupted_chunks_are_never_built_upon(span_model, push, then):
    async def interrupted_after(seconds):
        swarm = Swarm(span_model, ONCE, push=push)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(3, 5)
        call = asyncio.ensure_future(talk.prefill((2, 0), (0, 3), (1, 1), (2, 2)))
        await asyncio.wait({call}, timeout=seconds)
        assert not call.done()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await talk.step(*then)
        await talk.prefill((1, 0), (2, 1))
        assert swarm.planner.failures == []
        assert [server.count(messages.OpenSession) for server in swarm.servers.values()] == [1, 1, 1]

    took = (4 if push else 6) * DELAY + (4 + 3 - 1) * COMPUTE
    for part in range(8):
        virtual_time.run(lambda part=part: interrupted_after(took * part / 8))
