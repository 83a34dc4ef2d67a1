"""Tokens that leave inside spans, as a chain sees them: servers say so, and what a hop was sent its successor is sent.

The servers compute every token in full; what they say about exits is put into their mouths.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import ProtocolViolation
from swarm.protocol import messages
from tests import virtual_time
from tests.client.chains import BLOCKS, HIDDEN, ONCE, TWICE, Conversation, Server, Swarm

TERMS = messages.ExitTerms("similarity", ((1, 0.5), (3, 0.5)), "row")


def says(left: list[int]) -> Any:
    """Puts `left` into what a server sends about steps that may leave."""

    def tamper(message: messages.Message, payload: Any) -> Any:
        if isinstance(message, messages.StepReply) and message.step:
            message = msgspec.structs.replace(message, left=left)
        elif isinstance(message, messages.PushRequest) and message.step.exits is not None:
            message = msgspec.structs.replace(message, step=msgspec.structs.replace(message.step, left=left))
        return message, payload

    return tamper


def nothing(count: int) -> PackedHidden:
    return PackedHidden(torch.zeros(count, HIDDEN).numpy().tobytes(), count, HIDDEN, WireFormat.NONE, "float32")


async def prompted(swarm: Swarm, early_exits: bool = True) -> Conversation:
    """A chain that has computed a prompt of two sequences in full."""
    await swarm.start()
    talk = await swarm.chain(early_exits)
    await talk.append(3, 5)
    return talk


async def answered(talk: Conversation, number: int) -> list[tuple[int, ...] | None]:
    """What the copies of a step say about where its tokens left, when all have come."""
    blocks = [*talk.chain.route.boundaries, BLOCKS]
    await talk.chain.wait(lambda: all(talk.chain.outputs(number, block) is not None for block in blocks))
    found = [talk.chain.outputs(number, block) for block in blocks]
    return [one.left if one is not None else None for one in found]


def asked(server: Server, step: int) -> list[messages.StepRequest]:
    """A step as it came to a server, however it came."""
    found = [message.step if isinstance(message, messages.PushRequest) else message for _, message in server.heard]
    return [one for one in found if isinstance(one, messages.StepRequest) and one.step == step]


@pytest.mark.parametrize("push", [True, False])
def test_copies_say_where_tokens_left_and_the_servers_behind_hear_it(span_model, push):
    async def scenario():
        swarm = Swarm(span_model, ONCE, push=push)
        talk = await prompted(swarm)
        swarm.servers["a"].tamper = says([0, 1])
        swarm.servers["b"].tamper = swarm.servers["c"].tamper = says([3, 1])
        for position in range(3):
            number = await talk.chain.begin(nothing(2), StepLayout((3 + position, 5 + position), (1, 1)), TERMS)
            assert await answered(talk, number) == [(0, 1), (3, 1), (3, 1)]
            talk.chain.settle(number)
            heard = [asked(swarm.servers[name], number)[0] for name in "abc"]
            assert [one.exits for one in heard] == [TERMS] * 3
            assert [one.left for one in heard] == [None, [0, 1], [3, 1]]
        assert swarm.planner.failures == []
        assert [server.count(messages.OpenSession) for server in swarm.servers.values()] == [1, 1, 1]
        assert all(
            message.early_exits
            for server in swarm.servers.values()
            for _, message in server.heard
            if isinstance(message, messages.OpenSession)
        )

    virtual_time.run(scenario)


@pytest.mark.parametrize(("lost", "push"), [("a", True), ("b", False), ("c", True)])
def test_a_server_that_takes_over_is_sent_what_the_lost_one_was_sent(span_model, push, lost):
    """Its cache is filled by a replay, in full; the tokens that had left on their way come to it as such."""

    async def scenario():
        swarm = Swarm(span_model, TWICE, push=push)
        talk = await prompted(swarm)
        for name in ("a", "a2"):
            swarm.servers[name].tamper = says([1, 0])
        for name in ("b", "b2", "c", "c2"):
            swarm.servers[name].tamper = says([1, 3])
        first = await talk.chain.begin(nothing(2), StepLayout((3, 5), (1, 1)), TERMS)
        await answered(talk, first)
        talk.chain.settle(first)
        swarm.on_message = lambda source, target, message: (
            (  # it gets the next step, and says nothing any more
                swarm.kill(lost) if source == lost and isinstance(message, messages.StepReply) else None
            )
            is not None
        )
        second = await talk.chain.begin(nothing(2), StepLayout((4, 6), (1, 1)), TERMS)
        assert await answered(talk, second) == [(1, 0), (1, 3), (1, 3)]
        talk.chain.settle(second)
        other = swarm.servers[lost + "2"]
        assert other.count(messages.ReplayRequest) == 1
        # (heard twice if the server before has pushed it as well)
        assert {str(one.left) for one in asked(other, second)} == {{"a": "None", "b": "[1, 0]", "c": "[1, 3]"}[lost]}
        assert all(one.exits == TERMS for one in asked(other, second))
        assert other.heard[0][1].early_exits
        third = await talk.chain.begin(nothing(2), StepLayout((5, 7), (1, 1)))
        for server in swarm.servers.values():
            server.tamper = lambda message, payload: (message, payload)
        assert await answered(talk, third) == [None] * 3
        assert [name for name, _ in swarm.planner.failures] == [lost]

    virtual_time.run(scenario)


@pytest.mark.parametrize(("terms", "left"), [(TERMS, [0, 3]), (None, [1, 1])], ids=["behind its span", "not asked"])
def test_a_server_that_is_wrong_about_exits_is_replaced(span_model, terms, left):
    async def scenario():
        swarm = Swarm(span_model, {**ONCE, "a2": (0, 2)})
        talk = await prompted(swarm, early_exits=terms is not None)
        swarm.servers["a"].tamper = says(left)
        number = await talk.chain.begin(nothing(2), StepLayout((3, 5), (1, 1)), terms)
        assert (await answered(talk, number))[0] is None
        ((name, error),) = swarm.planner.failures  # and not the servers that it has told the same
        assert name == "a"
        assert isinstance(error, ProtocolViolation)
        assert "tokens have left in front of blocks" in str(error)
        assert talk.chain.route.hops[0].server.peer_id == "a2"

    virtual_time.run(scenario)


def test_given_up_steps_leave_nothing_behind(span_model):
    """Steps under way whose tokens have left are given up; another one takes their place, in full."""

    async def scenario():
        swarm = Swarm(span_model, ONCE)
        talk = await prompted(swarm)
        for server in swarm.servers.values():
            server.tamper = says([1, 1])
        numbers = [
            await talk.chain.begin(nothing(2), StepLayout((3 + more, 5 + more), (1, 1)), TERMS) for more in range(3)
        ]
        await talk.chain.wait(lambda: talk.chain.outputs(numbers[0], 2) is not None)
        assert talk.chain.outputs(numbers[0], 2).left == (1, 1)
        await talk.chain.give_up_under_way(numbers[0] - 1)
        assert [talk.chain.outputs(number, 2) for number in numbers] == [None] * 3
        await asyncio.sleep(1)
        for server in swarm.servers.values():
            server.tamper = lambda message, payload: (message, payload)
        await talk.append(2, 1)  # compared with the full model
        assert swarm.planner.failures == []

    virtual_time.run(scenario)
