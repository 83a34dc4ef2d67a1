"""A server's answers, by streams in memory. Each hostile client is followed by a look at a well-behaved one."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.common.version import VERSION
from swarm.data_structures import Span, WireFormat
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.protocol.framing import MAX_HEADER_BYTES
from tests.server.conversations import (
    CPU,
    FORWARD,
    HIDDEN,
    OPEN,
    PATIENCE,
    SPAN,
    STEP,
    assert_close,
    beside_good_client,
    bytes_of,
    changed,
    random,
    raw,
    scenario,
    with_server,
)

POISON = 12345.0
"""An input that makes the computation raise."""


@beside_good_client()
async def test_a_session_from_open_to_close(server):
    client = await (await server.client()).begin()
    assert (len(server.sessions), server.sessions.free) == (2, 64 - 8 - 8)
    for tokens in (1, 3, 2):
        reply = await client.right_step(tokens)
        assert reply.compute_ms > 0
        assert not reply.pushed
    await client.stream.send(messages.CloseSession())
    await client.is_over()
    assert (len(server.sessions), server.sessions.free) == (1, 64 - 8)


@pytest.mark.parametrize("wire", WireFormat)
@beside_good_client()
async def test_every_format_in_both_directions(server, model, wire):
    client = await server.client()
    await client.ask(changed(OPEN, reply_format=wire))
    hidden = random(3)
    request = messages.StepRequest(0, [0], [3], wire, "float32")
    reply, payload = await client.ask(request, encode_tensor(hidden, wire))
    assert reply.format is wire
    output = decode_tensor(payload, 3, HIDDEN, wire, reply.dtype, CPU)
    expected = model.forward(hidden.unsqueeze(0))[0]
    assert torch.nn.functional.cosine_similarity(output.flatten(), expected.flatten(), dim=0) > 0.999


@beside_good_client()
async def test_a_forward_keeps_nothing(server, model):
    client = await server.client()
    hidden = random(3)
    for start, end in ((1, 4), (2, 4), (1, 2)):
        part = model.narrowed(Span(start, end))
        expected = torch.cat([part.forward(row.unsqueeze(0))[0] for row in hidden.split([2, 1])])
        reply, payload = await client.ask(
            changed(FORWARD, start=start, end=end), encode_tensor(hidden, WireFormat.NONE)
        )
        assert isinstance(reply, messages.ForwardReply)
        assert reply.compute_ms > 0
        output = decode_tensor(payload, 3, HIDDEN, WireFormat.NONE, "float32", CPU)
        assert_close(output, expected)
    assert len(server.sessions) == 1


@beside_good_client()
async def test_information_about_the_server(server):
    reply, _ = await (await server.client()).ask(messages.InfoRequest())
    assert reply == messages.InfoReply(SPAN.start, SPAN.end, 64 - 8, 1, VERSION)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        pytest.param("wrong_span", {"start": 0}, id="block before the span"),
        pytest.param("wrong_span", {"end": 5}, id="block behind the span"),
        pytest.param("wrong_span", {"start": 2, "end": 2}, id="no blocks"),
        pytest.param("wrong_span", {"revision": "other"}, id="other revision"),
        pytest.param("too_long", {"max_length": 65}, id="longer than the whole cache"),
        pytest.param("cache_full", {"max_length": 57}, id="longer than what is free"),
    ],
)
@beside_good_client()
async def test_a_session_that_cannot_be_opened(server, code, changes):
    client = await server.client()
    await client.refused(code, changed(OPEN, **changes))
    assert len(server.sessions) == 1
    await client.begin()  # the same stream may ask again


@pytest.mark.parametrize(
    ("code", "changes", "payload"),
    [
        pytest.param("wrong_position", {"starts": [3]}, bytes_of(1), id="position ahead"),
        pytest.param("wrong_position", {"sources": [1]}, bytes_of(1), id="source that is not there"),
        pytest.param("too_long", {"counts": [7]}, bytes_of(7), id="beyond max_length"),
        pytest.param("too_long", {"starts": [2**31 - 1]}, bytes_of(1), id="start far beyond"),
        pytest.param("too_long", {"counts": [0]}, b"", id="no tokens"),
        pytest.param("wrong_shape", {}, b"", id="no payload"),
        pytest.param("wrong_shape", {}, bytes_of(1)[:-1], id="payload too short"),
        pytest.param("wrong_shape", {"format": WireFormat.BLOCKWISE8}, bytes_of(1), id="payload of another format"),
        pytest.param("wrong_dtype", {"dtype": "float64"}, bytes_of(2), id="unknown dtype"),
        pytest.param("wrong_shape", {"starts": [2, 0]}, bytes_of(1), id="more starts than counts"),
    ],
)
@beside_good_client()
async def test_a_refused_step_changes_nothing(server, code, changes, payload):
    client = await (await server.client()).begin()
    free = server.sessions.free
    for _ in range(2):
        await client.refused(code, changed(STEP, **changes), payload)
    assert server.sessions.free == free
    await client.right_step()


@beside_good_client()
async def test_a_step_from_long_ago(server):
    client = await (await server.client()).begin()
    await client.right_step()
    await client.refused("wrong_position", changed(STEP, step=0, starts=[0]), bytes_of(1))
    await client.right_step()


@pytest.mark.parametrize("number", [2, 1000, 2**31 - 2])
@beside_good_client()
async def test_numbers_may_leave_gaps(server, number):
    """A step that its client gave up has a number that never comes."""
    client = await (await server.client()).begin()
    client.steps = number
    await client.right_step()
    late = changed(STEP, starts=[3])
    await client.refused("wrong_position", late, bytes_of(1))
    if number < 2**31 - 2:
        await client.right_step()


@pytest.mark.parametrize(
    ("code", "changes", "payload"),
    [
        pytest.param("wrong_span", {"end": 5}, bytes_of(3), id="other blocks"),
        pytest.param("wrong_span", {"revision": "other"}, bytes_of(3), id="other revision"),
        pytest.param("wrong_shape", {}, bytes_of(2), id="payload too short"),
        pytest.param("wrong_shape", {"offsets": [0]}, bytes_of(3), id="fewer offsets than counts"),
        pytest.param("wrong_dtype", {"dtype": "int8"}, bytes_of(3), id="unknown dtype"),
        pytest.param("too_long", {"counts": [0, 0]}, b"", id="no tokens"),
        pytest.param("too_long", {"counts": [2**31 - 1] * 4096}, b"", id="more tokens than there are numbers"),
        pytest.param(
            "too_long",
            {"counts": [9, 8], "format": WireFormat.FLOAT16},
            bytes_of(17, WireFormat.FLOAT16),
            id="too many tokens",
        ),
    ],
)
@beside_good_client()
async def test_a_forward_that_is_refused(server, code, changes, payload):
    client = await server.client()
    await client.refused(code, changed(FORWARD, **changes), payload)
    reply, _ = await client.ask(FORWARD, encode_tensor(random(3), WireFormat.NONE))
    assert isinstance(reply, messages.ForwardReply)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        pytest.param(raw(b"\xc1garbage"), b"", id="garbage"),
        pytest.param(raw(b""), b"", id="empty header"),
        pytest.param(raw(b"\x91" * 100_000), b"", id="deep header"),
        pytest.param(raw(b"x" * (MAX_HEADER_BYTES + 1)), b"", id="header too large"),
        pytest.param(messages.SessionOpened(0), b"", id="reply instead of a request"),
        pytest.param(messages.Refusal("peer_lost", "boo"), b"", id="refusal instead of a request"),
        pytest.param(changed(STEP, counts=[-1]), b"", id="negative count"),
        pytest.param(changed(STEP, counts=[1] * 5000), b"", id="too many rows"),
        pytest.param(changed(OPEN, session_id=b"short"), b"", id="short session id"),
        pytest.param(STEP, bytes(messages.MAX_PROBE_BYTES + 1), id="payload larger than any step"),
    ],
)
@beside_good_client()
async def test_a_frame_that_is_no_request_ends_the_connection(server, message, payload):
    client = await (await server.client()).begin()
    await client.refused("protocol_violation", message, payload)
    await client.is_over()
    # Its session is still there for a while, and it may come back for it.
    again = await server.client()
    assert await again.ask(OPEN) == (messages.SessionOpened(1), b"")


@beside_good_client()
async def test_a_second_session_on_one_stream(server):
    client = await (await server.client()).begin()
    await client.refused("protocol_violation", changed(OPEN, session_id=b"another session!"))
    await client.is_over()
    assert len(server.sessions) == 2


def test_a_lost_reply_is_sent_again_and_not_computed_again(model, monkeypatch):
    calls = []
    forward = model.forward_tokens

    def counted(*args):
        calls.append(1)
        return forward(*args)

    monkeypatch.setattr(model, "forward_tokens", counted)

    async def act(server):
        client = await (await server.client()).begin()
        request = (STEP, encode_tensor(random(1, 7), WireFormat.NONE))
        first = await client.ask(*request)
        computed = len(calls)
        assert computed == 3  # the other client has begun, too
        assert await client.ask(*request) == first
        client.stream.close()

        # Also through another connection.
        again = await server.client()
        assert await again.ask(OPEN) == (messages.SessionOpened(2), b"")
        assert await again.ask(*request) == first
        assert len(calls) == computed
        again.history, again.steps = torch.cat([client.history, random(1, 7)]), 2
        await again.right_step()

    scenario(model, act)


@with_server()
async def test_a_leaving_server(server):
    """It takes on nothing new, but goes on with what it has begun; in the end it refuses that, too."""
    client = await (await server.client()).begin()
    server.handler.closing = True
    await (await server.client()).refused("server_closing", changed(OPEN, session_id=b"another session!"))
    await (await server.client()).refused("server_closing", FORWARD, bytes_of(3))
    reply, _ = await (await server.client()).ask(messages.InfoRequest())
    assert isinstance(reply, messages.InfoReply)
    await client.right_step()
    payload = encode_tensor(random(1, 7), WireFormat.NONE)
    request = changed(STEP, step=2, starts=[3])
    last = await client.ask(request, payload)
    assert isinstance(last[0], messages.StepReply)

    server.handler._steps.closed = True
    await client.refused("server_closing", changed(STEP, step=3, starts=[4]), bytes_of(1))
    replay = messages.ReplayRequest(3, [0], [1], WireFormat.NONE, "float32", None, False)
    await client.refused("server_closing", replay, bytes_of(1))
    assert await client.ask(request, payload) == last  # what it has computed, it hands out


@with_server()
async def test_clients_are_told_to_go_elsewhere_and_may_still_use_what_they_have(server):
    client = await (await server.client()).begin()
    gone = await (await server.client("gone")).begin()
    gone.stream.close()
    idle = await server.client("without a session")
    await idle.ask(messages.InfoRequest())
    await asyncio.sleep(0)
    await server.handler.hand_over()
    notice, _ = await client.hear()
    assert isinstance(notice, messages.Refusal)
    assert notice.code == "server_closing"
    await client.right_step()
    await idle.ask(messages.InfoRequest())  # which heard nothing of it


@with_server()
async def test_in_the_end_all_streams_end(server):
    client = await (await server.client()).begin()
    idle = await server.client("idle")
    await idle.ask(messages.InfoRequest())
    server.handler.hang_up()
    await client.is_over()
    await idle.is_over()
    assert len(server.sessions) == 0
    await server.handler.idle()


@pytest.fixture
def poisonable(model, monkeypatch):
    """The model, which fails on one input after having written to the cache."""
    forward = model.forward_tokens

    def fragile(hidden, *args):
        output = forward(hidden, *args)
        if (hidden == POISON).any():
            raise RuntimeError("secret path /home/somebody")
        return output

    monkeypatch.setattr(model, "forward_tokens", fragile)
    return model


def test_a_computation_that_fails_is_told_to_its_client_alone(poisonable, caplog):
    async def act(server):
        client = await (await server.client()).begin()
        poison = encode_tensor(torch.full((1, HIDDEN), POISON), WireFormat.NONE)
        for _ in range(2):
            text = await client.refused("server_fault", STEP, poison)
            assert "secret" not in text
        await client.right_step()
        text = await client.refused("server_fault", changed(FORWARD, counts=[1]), poison)
        await client.right_step()

    scenario(poisonable, act)
    assert caplog.text.count("secret path") >= 3  # the log has what the client must not have


def test_a_failed_rollback_cannot_be_continued_with_wrong_contents(poisonable):
    async def act(server):
        client = await (await server.client()).begin(tokens=4)
        poison = encode_tensor(torch.full((1, HIDDEN), POISON), WireFormat.NONE)
        await client.refused("server_fault", changed(STEP, starts=[1]), poison)
        reply, _ = await client.ask(changed(STEP, starts=[4]), bytes_of(1))
        if isinstance(reply, messages.Refusal):
            assert reply.code == "wrong_position"
            client.history = client.history[:1]
            await client.right_step()
        else:
            client.history, client.steps = torch.cat([client.history, torch.zeros(1, HIDDEN)]), 2
            await client.right_step()

    scenario(poisonable, act)


@pytest.mark.parametrize("wire", WireFormat)
def test_values_that_would_spoil_the_cache_are_refused(model, wire):
    """In a step, a replay and a forward; the session is as it was."""

    async def act(server):
        client = await (await server.client()).begin()
        hidden = torch.ones(1, HIDDEN)
        hidden[0, 5] = float("inf")
        payload = encode_tensor(hidden, wire)
        await client.refused("not_finite", changed(STEP, format=wire), payload)
        replay = messages.ReplayRequest(2, [2], [1], wire, "float32", None, True)
        await client.refused("not_finite", replay, payload)
        await client.refused("not_finite", changed(FORWARD, counts=[1], format=wire), payload)
        await client.right_step()

    scenario(model, act)


@beside_good_client(streams=2)
async def test_too_many_streams_of_one_peer(server):
    clients = [await server.client() for _ in range(2)]
    for client in clients:
        await client.ask(messages.InfoRequest())
    third = await server.client()
    frame = await asyncio.wait_for(third.stream.receive(), PATIENCE)
    refusal = messages.decode_server(frame.header)
    assert refusal.code == "cache_full"
    assert "2 streams" in refusal.message
    await third.is_over()

    await (await server.client("somebody else")).ask(messages.InfoRequest())
    clients[0].stream.close()
    await clients[0].is_over()
    await (await server.client()).begin()


@beside_good_client()
async def test_a_step_number_is_not_answered_for_another_step(server):
    """The reply is kept for a request that is sent again, not for one that happens to have its number."""
    client = await (await server.client()).begin()
    first, other = random(1, seed=1), random(1, seed=2)
    reply, payload = await client.ask(STEP, encode_tensor(first, WireFormat.NONE))
    assert isinstance(reply, messages.StepReply)
    refused, _ = await client.ask(STEP, encode_tensor(other, WireFormat.NONE))
    assert isinstance(refused, messages.Refusal)
    assert refused.code == "wrong_position"
    again, same = await client.ask(STEP, encode_tensor(first, WireFormat.NONE))
    assert (again, same) == (reply, payload)


@pytest.mark.parametrize(("sent", "wanted"), [(0, 1), (5000, 0), (1, messages.MAX_PROBE_BYTES)])
@beside_good_client()
async def test_a_probe_carries_as_many_bytes_as_are_asked_for(server, sent, wanted):
    client = await server.client()
    assert await client.ask(messages.ProbeRequest(wanted), bytes(sent)) == (messages.ProbeReply(), bytes(wanted))
