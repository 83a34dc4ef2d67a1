"""Steps that continue what a server has not seen, and steps that were given up."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.server.compute import engine as engine_module
from swarm.server.compute.engine import Engine
from swarm.server.sessions.session import Session
from tests.server.conversations import (
    HIDDEN,
    OPEN,
    PATIENCE,
    alone,
    beside_good_client,
    changed,
    in_virtual_time,
    random,
    with_server,
)


def step(number: int, start: int, epoch: int) -> messages.StepRequest:
    return messages.StepRequest(number, [start], [1], WireFormat.NONE, "float32", epoch=epoch)


PAYLOAD = encode_tensor(torch.zeros(1, HIDDEN), WireFormat.NONE)


@beside_good_client()
async def test_a_step_that_continues_what_did_not_come_is_refused(server):
    """Its position would be right, but what lies before it would be what the client has given up."""
    client = await (await server.client()).begin()  # step 0, two tokens
    await client.right_step()
    said = await client.refused("wrong_position", step(5, 2, epoch=4), PAYLOAD)
    assert "continues step 4" in said
    await client.refused("wrong_position", step(5, 2, epoch=6), PAYLOAD)
    for number, start, epoch in ((4, 1, 4), (5, 2, 4), (6, 3, 4), (7, 4, 7)):
        reply, _ = await client.ask(step(number, start, epoch), PAYLOAD)
        assert reply.step == number
    await client.refused("wrong_position", step(8, 5, epoch=4), PAYLOAD)


@beside_good_client()
async def test_a_step_that_sets_sequences_back_is_refused_where_the_one_before_it_is_missing(server):
    """What would be kept of them might not be what that one left."""
    client = await (await server.client()).begin()  # step 0, two tokens
    back = step(3, 1, epoch=3)
    said = await client.refused("wrong_position", changed(back, follows=1), PAYLOAD)
    assert "follows step 1, which has not come" in said
    reply, _ = await client.ask(changed(back, follows=0), PAYLOAD)
    assert reply.step == 3
    replay = messages.ReplayRequest(5, [0], [2], WireFormat.NONE, "float32", None, False)
    await client.ask(replay, encode_tensor(random(2), WireFormat.NONE))
    await client.refused("wrong_position", changed(step(6, 1, epoch=6), follows=5), PAYLOAD)
    reply, _ = await client.ask(changed(step(6, 1, epoch=6), follows=4), PAYLOAD)
    assert reply.step == 6


@beside_good_client()
async def test_steps_that_were_given_up_are_not_computed(server):
    client = await (await server.client()).begin()
    await client.stream.send(messages.GiveUp(1, 3))
    await client.stream.send(messages.StepRequest(2, [2], [1], WireFormat.NONE, "float32"), PAYLOAD)
    client.steps = 3
    request = changed(client.next_step(), epoch=3)
    reply, payload = await client.ask(request, encode_tensor(random(1, 3), WireFormat.NONE))
    client.check(reply, payload, random(1, 3))


@pytest.mark.timeout(30)
@beside_good_client()
async def test_a_replay_after_two_billion_steps_were_given_up_takes_no_longer_than_another(server):
    """Whether None is in a range is found out by looking through all of it, in the network loop: for a minute."""
    client = await (await server.client()).begin()
    await client.stream.send(messages.GiveUp(1, 2**31 - 1))
    replay = messages.ReplayRequest(5, [0], [2], WireFormat.NONE, "float32", None, False)
    reply, _ = await client.ask(replay, encode_tensor(random(2), WireFormat.NONE))
    assert isinstance(reply, messages.ReplayReply)


@pytest.mark.parametrize(("exit_block", "urgent"), [(None, True), (0, False), (1, False), (2, True), (4, True)])
def test_a_step_is_not_urgent_at_or_behind_the_block_where_its_token_may_leave(model, monkeypatch, exit_block, urgent):
    """This server begins with block 1. Where the exit lies inside its span, the client waits for a part of it."""
    seen: list[bool] = []
    submit = Engine.submit

    def watched(engine, request):
        seen.append(request.urgent)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", watched)

    async def act(server):
        client = await (await server.client()).begin()
        reply, payload = await client.ask(
            changed(client.next_step(), exit_block=exit_block), encode_tensor(random(1, 1), WireFormat.NONE)
        )
        client.check(reply, payload, random(1, 1))
        replay = messages.ReplayRequest(9, [0], [2], WireFormat.NONE, "float32", None, False)
        await client.ask(replay, encode_tensor(random(2), WireFormat.NONE))

    alone(model, act)
    assert seen == [True, urgent, True]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each iteration of the engine."""
    found: list[int] = []
    advance = engine_module.advance_steps

    def counted(parts: list[tuple[object, int]]) -> None:
        found.append(sum(tokens for _, tokens in parts))
        advance(parts)

    monkeypatch.setattr(engine_module, "advance_steps", counted)
    return found


@with_server()
async def test_a_step_that_is_given_up_while_it_waits_is_dropped(server, computed):
    """The server before has pushed it; the client, whose stream is free meanwhile, does not want it any more."""
    client = await (await server.client()).begin()
    await client.stream.send(messages.SetNeighbors("before", None, None, 2))
    before, go_on = await server.client("before"), threading.Event()
    assert server.runtime.post(lambda: go_on.wait(PATIENCE) or None)
    computed.clear()
    unwanted = changed(client.next_step(), exit_block=0)
    await before.stream.send(messages.PushRequest("hostile", OPEN.session_id, unwanted), PAYLOAD)
    await server.until(lambda: server.session().computing is not None)
    await client.stream.send(messages.GiveUp(1, 2))
    await server.until(lambda: server.session().computing is None)
    client.steps = 2
    wanted, hidden = changed(client.next_step(), epoch=2), random(1, 2)
    await before.stream.send(
        messages.PushRequest("hostile", OPEN.session_id, wanted), encode_tensor(hidden, WireFormat.NONE)
    )
    await server.until(lambda: server.session().computing is not None)
    go_on.set()
    client.check(*await client.hear(), hidden)
    assert computed == [1], "the one that was given up took no time"


@in_virtual_time(capacity=16)
async def test_a_step_that_is_given_up_while_it_waits_for_cache_is_not_refused_either(server):
    await (await server.client("hog")).begin()
    client = await (await server.client()).begin(changed(OPEN, wait_timeout_s=PATIENCE))
    await client.stream.send(messages.SetNeighbors("before", None, None, 2))
    before = await server.client("before")
    unwanted = changed(client.next_step(), starts=[2, 0], counts=[1, 1])  # a second sequence
    payload = encode_tensor(random(2, 1), WireFormat.NONE)
    await before.stream.send(messages.PushRequest("hostile", OPEN.session_id, unwanted), payload)
    await server.until(lambda: server.session().reserving.locked())
    await client.stream.send(messages.GiveUp(1, 2))
    await client.hears_nothing(PATIENCE + 1)  # there never was any cache
    assert not server.session().reserving.locked()
    client.steps = 2
    reply, payload = await client.ask(
        changed(client.next_step(), epoch=2), encode_tensor(random(1, 2), WireFormat.NONE)
    )
    client.check(reply, payload, random(1, 2))


@beside_good_client()
async def test_a_refilled_cache_belongs_to_an_epoch(server):
    client = await (await server.client()).begin()
    for epoch in (7, 3):
        replay = messages.ReplayRequest(9, [0], [2], WireFormat.NONE, "float32", None, False, epoch)
        reply, _ = await client.ask(replay, encode_tensor(random(2), WireFormat.NONE))
        assert isinstance(reply, messages.ReplayReply)
        await client.refused("wrong_position", step(9, 2, epoch + 1), PAYLOAD)
        reply, _ = await client.ask(step(9, 2, epoch), PAYLOAD)
        assert reply.step == 9


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=8))
def test_given_up_steps_are_those_that_the_client_gave_up(lengths):
    """A client gives up the newest steps: some of those before were given up, too, or are computed."""
    session = Session.__new__(Session)
    session.given_up, session.computing = range(0), None
    begun, given_up = 0, set()
    for kept, more in lengths:
        begun += kept + more
        session.give_up(begun - more, begun)
        given_up |= set(range(begun - more, begun))
        assert set(session.given_up) <= given_up
        assert begun - 1 in session.given_up
