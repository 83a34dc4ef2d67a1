"""Steps that a link inside a server holds back, to be computed as one with those that follow."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.server.sessions.pushing.local_push_link import MAX_HOLD_S
from swarm.server.sessions.pushing.step_merging import MAX_MERGED_TOKENS, may_wait, mergeable
from tests.server.conversations import assert_close, on_virtual_time, random
from tests.server.sessions.pushing.test_local_push_link import (
    LONG,
    PARTS,
    SERVER,
    CutClient,
    answer,
    computed,
    model,
    parts_of,
    session_id,
    step,
)

__all__ = ["computed", "model"]  # fixtures

BOUNDARY = PARTS[1].start


async def begun(server) -> CutClient:
    """A client whose sessions have two tokens."""
    cut = await CutClient.begin(server)
    await cut.step(step(0, 0, 2), random(2))
    return cut


async def send_held(cut: CutClient, numbers: range, exit_block: int = BOUNDARY) -> None:
    for number in numbers:
        await cut.send(step(number, number + 1, exit_block=exit_block), random(1, number))
        assert (await answer(cut.streams[0]))[0].pushed


def expected(model, last: int) -> torch.Tensor:
    return model.forward(torch.cat([random(2), *(random(1, number) for number in range(1, last + 1))]).unsqueeze(0))[0]


def test_steps_are_held_until_an_urgent_one_comes_and_computed_with_it(model, computed):
    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 4))
        await cut.streams[1].hears_nothing(0.9 * MAX_HOLD_S)
        computed.clear()
        await cut.send(step(4, 5), random(1, 4))
        for number in range(1, 5):
            reply, output = await answer(cut.streams[1])
            assert reply.step == number
            assert_close(output, expected(model, 4)[number + 1 : number + 2])
        assert computed == [(PARTS[0], 1), (PARTS[1], 4)]

    on_virtual_time(model, act)


@pytest.mark.parametrize("last", [2, 3, 100])
def test_steps_are_held_until_the_client_waits_for_one_of_them(model, computed, last):
    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 4))
        computed.clear()
        for _ in range(2):  # the second one changes nothing
            await cut.streams[1].stream.send(messages.Expedite(last))
        for number in range(1, 4):
            assert (await answer(cut.streams[1]))[0].step == number
        assert computed == [(PARTS[1], 3)]
        assert asyncio.get_running_loop().time() == 0

    on_virtual_time(model, act)


def test_what_the_client_waits_for_is_not_held_when_it_comes_later(model):
    async def act(server):
        cut = await begun(server)
        await cut.streams[1].stream.send(messages.Expedite(2))
        await cut.streams[1].ask(messages.InfoRequest())
        await send_held(cut, range(1, 4))
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        await cut.streams[1].hears_nothing(0.9 * MAX_HOLD_S)
        assert (await answer(cut.streams[1]))[0].step == 3
        assert asyncio.get_running_loop().time() == pytest.approx(MAX_HOLD_S)

    on_virtual_time(model, act)


def test_steps_are_held_for_so_long_behind_the_newest(model):
    async def act(server):
        cut = await begun(server)
        for number in (1, 2):
            await send_held(cut, range(number, number + 1))
            await cut.streams[1].hears_nothing(0.8 * MAX_HOLD_S)
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() == pytest.approx(1.8 * MAX_HOLD_S)
        await server.handler.idle()

    on_virtual_time(model, act)


@pytest.mark.parametrize("exit_block", [PARTS[0].start, BOUNDARY + 1])
def test_only_steps_that_may_leave_just_here_are_held(model, exit_block):
    """Others may have left at another server, or cannot leave before this one has computed them."""

    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 3), exit_block)
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() == 0

    on_virtual_time(model, act)


def test_what_is_given_up_is_not_held(model, computed):
    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 4))
        computed.clear()
        await cut.streams[1].stream.send(messages.GiveUp(2, 4))
        assert (await answer(cut.streams[1]))[0].step == 1
        await cut.streams[1].hears_nothing(LONG)
        assert computed == [(PARTS[1], 1)]
        await cut.step(step(4, 3, epoch=4), random(1, 4))

    on_virtual_time(model, act)


def test_a_step_that_goes_back_ends_the_hold(model):
    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 3))
        await cut.send(step(3, 2, epoch=3, exit_block=BOUNDARY), random(1, 3))
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() == 0
        await cut.streams[1].stream.send(messages.Expedite(3))
        reply, output = await answer(cut.streams[1])
        assert reply.step == 3
        assert_close(output, model.forward(torch.cat([random(2), random(1, 3)]).unsqueeze(0))[0, -1:])

    on_virtual_time(model, act)


@pytest.mark.parametrize("end", ["the later part", "no link", "hang up"])
def test_held_steps_are_dropped_with_their_session_or_link(model, end):
    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 4))
        match end:
            case "the later part":
                await cut.streams[1].stream.send(messages.CloseSession())
            case "no link":
                await cut.streams[0].stream.send(messages.SetNeighbors(None, None, None))
            case "hang up":
                server.handler.hang_up()
        await server.handler.idle()
        assert asyncio.get_running_loop().time() <= MAX_HOLD_S
        assert not server.handler._pushed._waiting_bytes

    on_virtual_time(model, act)


def test_a_second_link_to_the_same_session_takes_the_hold_from_the_first(model):
    """Only one link is told that the client waits, so only that one may hold steps."""

    async def act(server):
        cut = await begun(server)
        await send_held(cut, range(1, 3))
        stream = await server.client("hostile")
        await stream.ask(messages.OpenSession(b"another session ", "main", 1, 2, 16, WireFormat.NONE))
        await cut.streams[1].hears_nothing(0.5)
        await stream.stream.send(messages.SetNeighbors(None, SERVER, session_id(PARTS[1])))
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() == pytest.approx(0.5)
        await send_held(cut, range(3, 4))
        assert (await answer(cut.streams[1]))[0].step == 3
        assert parts_of(server)[-1].fed_by is not None

    on_virtual_time(model, act)


def test_steps_without_room_behind_held_ones_end_the_hold(model, monkeypatch):
    async def act(server):
        cut = await begun(server)
        monkeypatch.setattr("swarm.server.sessions.pushing.local_push_link.MAX_WAITING_STEPS", 2)
        for number in range(1, 4):
            await cut.send(step(number, number + 1, exit_block=BOUNDARY), random(1, number))
        for number in (1, 2):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() == 0

    on_virtual_time(model, act)


def chunk(number: int, counts: list[int], exit_block: int | None) -> messages.StepRequest:
    starts = [number * count for count in counts]
    return messages.StepRequest(number, starts, counts, WireFormat.NONE, "float32", exit_block=exit_block)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20).filter(any),
    st.lists(st.sampled_from([BOUNDARY] * 12 + [None, BOUNDARY - 1]), min_size=1, max_size=24),
    st.integers(-1, 24),
)
def test_steps_wait_only_while_nobody_waits_and_others_can_go_with_them(counts, exit_blocks, awaited):
    steps = [chunk(number, counts, exit_block) for number, exit_block in enumerate(exit_blocks)]
    following = [*steps, chunk(len(steps), counts, BOUNDARY)]
    for_nobody = all(block == BOUNDARY for block in exit_blocks) and awaited < 0
    if may_wait(steps, BOUNDARY, awaited):
        assert for_nobody
        assert mergeable(following) == len(following) or max(counts) > 1  # several tokens a step may be too many
    elif for_nobody:
        longest, total = max(counts) * len(following), sum(counts) * len(following)
        assert longest > 16 or total > MAX_MERGED_TOKENS
