"""Filling a server's cache with what another one had been sent. Times are virtual."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm.data_structures import WireFormat
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor, payload_bytes
from swarm.protocol.input_checksum import input_checksum
from tests.server.conversations import (
    CPU,
    HIDDEN,
    OPEN,
    STEP,
    Client,
    assert_close,
    bytes_of,
    changed,
    in_virtual_time,
    random,
)

REPLAY = messages.ReplayRequest(7, [0], [4], WireFormat.NONE, "float32", None, False)
"""The past of a session whose next step is number 7."""


def done(request: messages.ReplayRequest, payload: Any) -> messages.ReplayReply:
    """The answer to a replay that takes no time."""
    return messages.ReplayReply(WireFormat.NONE, "float32", 0.0, input_checksum(request, payload))


async def replay_is_done(client: Client, request: messages.ReplayRequest, hidden: torch.Tensor) -> None:
    payload = encode_tensor(hidden, WireFormat.NONE)
    assert await client.ask(request, payload) == (done(request, payload), b"")


async def opened(server: Any, **changes: Any) -> Client:
    client = await server.client()
    reply, _ = await client.ask(changed(OPEN, **changes))
    assert reply == messages.SessionOpened(0)
    return client


def remembers(client: Client, hidden_TH: torch.Tensor, steps: int = REPLAY.next_step) -> None:
    """From now on `client` takes this for the past of its one row."""
    client.history, client.steps = hidden_TH, steps


def alone(model: SpanModel, row_TH: torch.Tensor) -> torch.Tensor:
    """Outputs of a row that is computed at once."""
    return model.forward(row_TH.unsqueeze(0))[0]


async def next_of(client: Client, rows: list[torch.Tensor], step: int, seed: int = 50) -> list[torch.Tensor]:
    """One more token for each row: its output. `rows` grow by it."""
    new = [random(1, seed + place) for place in range(len(rows))]
    request = changed(STEP, step=step, starts=[len(row) for row in rows], counts=[1] * len(rows))
    reply, payload = await client.ask(request, encode_tensor(torch.cat(new), WireFormat.NONE))
    assert isinstance(reply, messages.StepReply), reply
    rows[:] = [torch.cat([row, token]) for row, token in zip(rows, new, strict=True)]
    return list(decode_tensor(payload, len(rows), HIDDEN, WireFormat.NONE, "float32", CPU).split(1))


async def rows_are(client: Client, model: SpanModel, rows: list[torch.Tensor], step: int) -> None:
    """The server continues just these rows."""
    for row, output in zip(rows, await next_of(client, rows, step), strict=True):
        assert_close(output, alone(model, row)[-1:])


@pytest.mark.parametrize("wanted", [False, True], ids=["no outputs", "outputs"])
@pytest.mark.parametrize("wire", [WireFormat.NONE, WireFormat.BFLOAT16])
@in_virtual_time()
async def test_a_session_that_goes_on_at_another_server(server, model, wanted, wire):
    client = await opened(server, reply_format=wire)
    hidden = random(4)
    request = changed(REPLAY, return_outputs=wanted)
    sent = encode_tensor(hidden, WireFormat.NONE)
    reply, payload = await client.ask(request, sent)
    assert reply == changed(done(request, sent), format=wire)
    if wanted:
        output = decode_tensor(payload, 4, HIDDEN, wire, "float32", CPU)
        expected = alone(model, hidden)
        torch.testing.assert_close(output, expected, rtol=0, atol=(0.01 if wire else 1e-4) * expected.abs().max())
    else:
        assert payload == b""
    await client.refused("wrong_position", changed(STEP, step=6, starts=[4]), bytes_of(1))
    again = await server.client()
    assert await again.ask(changed(OPEN, reply_format=wire)) == (messages.SessionOpened(7), b"")


@in_virtual_time()
async def test_several_requests_for_ragged_rows(server, model):
    """The second row ends first: it takes no part in the last request, and is continued all the same."""
    client = await opened(server)
    rows = [random(5, 1), random(3, 2)]
    requests = [
        ([0, 0], [2, 2], torch.cat([rows[0][:2], rows[1][:2]])),
        ([2, 2], [2, 1], torch.cat([rows[0][2:4], rows[1][2:]])),
        ([4, 3], [1, 0], rows[0][4:]),
    ]
    for starts, counts, hidden in requests:
        request = changed(REPLAY, starts=starts, counts=counts)
        await replay_is_done(client, request, hidden)
    await rows_are(client, model, rows, 7)
    assert server.sessions.free == 64 - 2 * 8


@in_virtual_time()
async def test_a_row_of_which_nothing_is_replayed_is_cut_to_its_start(server, model):
    client = await opened(server)
    rows = [random(4, 1), random(4, 2)]
    await client.ask(
        changed(STEP, step=0, starts=[0, 0], counts=[4, 4]), encode_tensor(torch.cat(rows), WireFormat.NONE)
    )
    rows = [rows[0][:2], random(3, 3)]
    request = changed(REPLAY, starts=[2, 0], counts=[0, 3])
    await replay_is_done(client, request, rows[1])
    for ahead in ([3, 3], [2, 4]):
        await client.refused("wrong_position", changed(STEP, step=7, starts=ahead, counts=[1, 1]), bytes_of(2))
    await rows_are(client, model, rows, 7)


@in_virtual_time()
async def test_rows_that_are_not_replayed_are_gone(server):
    client = await opened(server)
    await client.ask(changed(STEP, step=0, starts=[0] * 3, counts=[2] * 3), bytes_of(6))
    hidden = random(4)
    await client.ask(REPLAY, encode_tensor(hidden, WireFormat.NONE))
    await client.refused("wrong_position", changed(STEP, step=7, starts=[4, 2], counts=[1, 1]), bytes_of(2))
    await client.refused("wrong_position", changed(STEP, step=7, starts=[4], sources=[1]), bytes_of(1))
    remembers(client, hidden)
    await client.right_step()


@in_virtual_time()
async def test_what_was_asked_before_is_void(server):
    """Pushed or delivered, also the request whose reply had been kept: the cache is another one now."""
    client = await (await server.client()).begin()
    await client.stream.send(messages.SetNeighbors("before", None, None))
    last = client.next_step(), encode_tensor(random(1, client.steps), WireFormat.NONE)
    await client.right_step()
    hidden = random(4)
    await client.ask(REPLAY, encode_tensor(hidden, WireFormat.NONE))
    jobs = server.runtime.jobs
    before = await server.client("before")
    for number in (1, 2, 6):
        late = changed(STEP, step=number, starts=[0])
        await before.stream.send(messages.PushRequest("hostile", OPEN.session_id, late), bytes_of(1))
        await client.refused("wrong_position", late, bytes_of(1))
    await client.refused("wrong_position", *last)
    await before.hears_nothing(10)
    assert server.runtime.jobs == jobs
    remembers(client, hidden)
    await client.right_step()


@in_virtual_time()
async def test_numbers_go_back_to_where_the_replay_ends(server):
    """A step that was computed, but whose answer never came, is delivered again after a replay of those before it."""
    client = await (await server.client()).begin()
    await client.right_step()
    hidden = random(4)
    await client.ask(changed(REPLAY, next_step=1), encode_tensor(hidden, WireFormat.NONE))
    await client.refused("wrong_position", changed(STEP, step=0, starts=[4]), bytes_of(1))
    remembers(client, hidden, 1)
    await client.right_step()
    await client.right_step()


@in_virtual_time(seconds=1.0)
async def test_a_replay_waits_for_the_step_that_runs(server):
    client = await (await server.client()).begin()
    again = await server.client()
    await again.ask(OPEN)
    step = asyncio.create_task(client.ask(client.next_step(), bytes_of(1)))
    await asyncio.sleep(0.5)
    hidden = random(4)
    await replay_is_done(again, REPLAY, hidden)
    assert isinstance((await step)[0], messages.StepReply)
    remembers(client, hidden)
    await client.right_step()


@pytest.mark.parametrize(
    ("code", "changes", "payload"),
    [
        pytest.param("wrong_position", {"starts": [4]}, bytes_of(4), id="position ahead"),
        pytest.param("not_finite", {}, b"\xff" * payload_bytes(4 * HIDDEN, WireFormat.NONE, "float32"), id="NaN"),
        pytest.param("too_long", {"counts": [9]}, bytes_of(9), id="beyond max_length"),
        pytest.param("too_long", {"counts": [0]}, b"", id="no tokens"),
        pytest.param("cache_full", {"starts": [0] * 9, "counts": [1] * 9}, bytes_of(9), id="too many rows"),
    ],
)
@in_virtual_time()
async def test_a_refused_replay_changes_nothing(server, code, changes, payload):
    client = await (await server.client()).begin()
    last = client.next_step(), encode_tensor(random(1, client.steps), WireFormat.NONE)
    kept = await client.ask(*last)
    client.check(*kept, random(1, client.steps))
    await client.refused(code, changed(REPLAY, **changes), payload)
    assert await client.ask(*last) == kept
    await client.right_step()
