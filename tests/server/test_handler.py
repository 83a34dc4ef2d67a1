"""A server's answers, by streams in memory. Each hostile client is followed by a look at a well-behaved one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch

from swarm.data_structures import Span, WireFormat
from swarm.errors import PeerLost
from swarm.models.checkpoint import open_checkpoint
from swarm.models.span import SpanModel, load_span
from swarm.protocol import messages
from swarm.protocol.compression import pack, payload_length, unpack
from swarm.protocol.framing import MAX_HEADER
from swarm.server.checks import Limits
from swarm.server.handler import Handler
from swarm.server.runtime import Runtime
from swarm.server.sessions import GRACE, IDLE, Sessions
from swarm.transport.memory import MemoryHub, MemoryNetwork
from swarm.version import VERSION
from tests import zoo

torch.set_num_threads(1)

HIDDEN, SPAN, REVISION = 32, Span(1, 4), "main"
CPU = torch.device("cpu")
PATIENCE = 30.0
POISON = 12345.0
"""An input that makes the computation raise."""

OPEN = messages.OpenSession(b"hostile-session!", REVISION, SPAN.start, SPAN.end, 8, WireFormat.NONE)
STEP = messages.StepRequest(1, [2], [1], WireFormat.NONE, "float32")
"""The right step after the two tokens that `Client.begin` sends."""
FORWARD = messages.ForwardRequest(REVISION, SPAN.start, SPAN.end, [2, 1], WireFormat.NONE, "float32", WireFormat.NONE)


def changed(message: Any, **changes: object) -> Any:
    return msgspec.structs.replace(message, **changes)


def raw(data: bytes) -> Any:
    """A header of just these bytes."""
    return msgspec.Raw(data)


def random(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SpanModel:
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    return load_span(open_checkpoint(folder), SPAN, dtype=torch.float32, device=CPU)


class Server:
    def __init__(self, model: SpanModel, capacity: int = 64, **limits: int) -> None:
        self.model = model
        self.now = 0.0
        self.hub = MemoryHub()
        self.runtime = Runtime()
        self.sessions = Sessions(capacity, lambda: self.now)
        self.network = MemoryNetwork(self.hub, "server")
        self.handler = Handler(
            self.network, model, REVISION, self.sessions, self.runtime, Limits(**{"step_tokens": 16, **limits})
        )

    async def start(self) -> None:
        async def serve(stream) -> None:
            try:
                await self.handler(stream)
            except PeerLost:
                pass
            finally:
                stream.close()  # as `Peer` does

        await self.network.serve(serve)

    async def client(self, name: str = "hostile") -> Client:
        return Client(self.model, await MemoryNetwork(self.hub, name).open_stream("server"))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0)


class Client:
    """One stream, by hand, and what has been sent through it."""

    def __init__(self, model: SpanModel, stream: Any) -> None:
        self.model = model
        self.stream = stream
        self.history = torch.empty(0, HIDDEN)
        self.steps = 0

    async def ask(self, message: Any, payload: Any = b"") -> tuple[messages.ServerMessage, bytes]:
        await self.stream.send(message, payload)
        frame = await asyncio.wait_for(self.stream.receive(), PATIENCE)
        return messages.decode_server(frame.header), bytes(frame.payload)

    async def begin(self, open_session: Any = OPEN, tokens: int = 2) -> Client:
        reply, _ = await self.ask(open_session)
        assert reply == messages.SessionOpened(0)
        await self.right_step(tokens)
        return self

    async def right_step(self, tokens: int = 1) -> None:
        """A step whose outputs are checked."""
        hidden = random(tokens, self.steps)
        start = len(self.history)
        request = messages.StepRequest(self.steps, [start], [tokens], WireFormat.NONE, "float32")
        reply, payload = await self.ask(request, pack(hidden, WireFormat.NONE))
        assert isinstance(reply, messages.StepReply), reply
        assert (reply.step, reply.format, reply.dtype) == (self.steps, WireFormat.NONE, "float32")
        assert reply.compute_ms > 0
        self.history = torch.cat([self.history, hidden])
        self.steps += 1
        expected = self.model.forward(self.history.unsqueeze(0))[0, start:]
        output = unpack(payload, tokens, HIDDEN, WireFormat.NONE, "float32", CPU)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))

    async def refused(self, code: str, message: Any, payload: Any = b"") -> str:
        """The refusal's text."""
        reply, rest = await self.ask(message, payload)
        assert isinstance(reply, messages.Refusal), reply
        assert (reply.code, rest) == (code, b"")
        assert reply.message
        return reply.message

    async def is_over(self) -> None:
        """The server has ended this stream."""
        with pytest.raises(PeerLost):
            await asyncio.wait_for(self.stream.receive(), PATIENCE)


def scenario(model: SpanModel, act: Callable[[Server], Awaitable[None]], **options: int) -> None:
    """Let `act` do its worst to a server, while another client works and goes on working."""

    async def whole() -> None:
        server = Server(model, **options)
        try:
            await server.start()
            good = await server.client("good")
            await good.begin(changed(OPEN, session_id=b"a decent session"))
            async with asyncio.timeout(PATIENCE):
                await act(server)
            await good.right_step()
            await good.right_step(2)
        finally:
            server.runtime.close()
            for task in server.hub.tasks:
                task.cancel()

    asyncio.run(whole())


def bytes_of(tokens: int, wire: WireFormat = WireFormat.NONE) -> bytes:
    """A payload of the right length for so many tokens."""
    return bytes(payload_length(tokens * HIDDEN, wire, "float32"))


def test_a_session_from_open_to_close(model):
    async def act(server):
        client = await (await server.client()).begin()
        assert (len(server.sessions), server.sessions.free) == (2, 64 - 8 - 8)
        for tokens in (1, 3, 2):
            await client.right_step(tokens)
        await client.stream.send(messages.CloseSession())
        await client.is_over()
        assert (len(server.sessions), server.sessions.free) == (1, 64 - 8)

    scenario(model, act)


def test_part_of_the_span(model):
    async def act(server):
        narrow = Client(model.narrowed(Span(2, 3)), (await server.client()).stream)
        await narrow.begin(changed(OPEN, start=2, end=3))
        await narrow.right_step(3)

    scenario(model, act)


@pytest.mark.parametrize("wire", WireFormat)
def test_every_format_in_both_directions(model, wire):
    async def act(server):
        client = await server.client()
        await client.ask(changed(OPEN, reply_format=wire))
        hidden = random(3)
        request = messages.StepRequest(0, [0], [3], wire, "float32")
        reply, payload = await client.ask(request, pack(hidden, wire))
        assert reply.format is wire
        output = unpack(payload, 3, HIDDEN, wire, reply.dtype, CPU)
        expected = model.forward(hidden.unsqueeze(0))[0]
        assert torch.nn.functional.cosine_similarity(output.flatten(), expected.flatten(), dim=0) > 0.999

    scenario(model, act)


def test_ragged_rows_in_one_step(model):
    async def act(server):
        client = await server.client()
        await client.ask(OPEN)
        hidden = random(5)
        request = messages.StepRequest(0, [0, 0], [2, 3], WireFormat.NONE, "float32")
        _, payload = await client.ask(request, pack(hidden, WireFormat.NONE))
        output = unpack(payload, 5, HIDDEN, WireFormat.NONE, "float32", CPU)
        expected = torch.cat([model.forward(row.unsqueeze(0))[0] for row in hidden.split([2, 3])])
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert server.sessions.free == 64 - 8 - 2 * 8

    scenario(model, act)


def test_a_forward_keeps_nothing(model):
    async def act(server):
        client = await server.client()
        hidden = random(3)
        for start, end in ((1, 4), (2, 4), (1, 2)):
            part = model.narrowed(Span(start, end))
            expected = torch.cat([part.forward(row.unsqueeze(0))[0] for row in hidden.split([2, 1])])
            reply, payload = await client.ask(changed(FORWARD, start=start, end=end), pack(hidden, WireFormat.NONE))
            assert isinstance(reply, messages.ForwardReply)
            output = unpack(payload, 3, HIDDEN, WireFormat.NONE, "float32", CPU)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert len(server.sessions) == 1

    scenario(model, act)


def test_information_about_the_server(model):
    async def act(server):
        reply, _ = await (await server.client()).ask(messages.InfoRequest())
        assert reply == messages.InfoReply(SPAN.start, SPAN.end, 64 - 8, 1, VERSION)

    scenario(model, act)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        pytest.param("wrong_span", {"start": 0}, id="block before the span"),
        pytest.param("wrong_span", {"end": 5}, id="block behind the span"),
        pytest.param("wrong_span", {"start": 4, "end": 6}, id="other blocks"),
        pytest.param("wrong_span", {"start": 2, "end": 2}, id="no blocks"),
        pytest.param("wrong_span", {"start": 3, "end": 2}, id="reversed blocks"),
        pytest.param("wrong_span", {"start": 2**31 - 1, "end": 2**31 - 1}, id="blocks beyond any"),
        pytest.param("wrong_span", {"revision": "other"}, id="other revision"),
        pytest.param("wrong_span", {"revision": ""}, id="no revision"),
        pytest.param("too_long", {"max_length": 65}, id="longer than the whole cache"),
        pytest.param("cache_full", {"max_length": 57}, id="longer than what is free"),
    ],
)
def test_a_session_that_cannot_be_opened(model, code, changes):
    async def act(server):
        client = await server.client()
        await client.refused(code, changed(OPEN, **changes))
        assert len(server.sessions) == 1
        await client.begin()  # the same stream may ask again

    scenario(model, act)


@pytest.mark.parametrize(
    ("code", "changes", "payload"),
    [
        pytest.param("wrong_position", {"step": 2}, bytes_of(1), id="number ahead"),
        pytest.param("wrong_position", {"step": 2**31 - 1}, bytes_of(1), id="number far ahead"),
        pytest.param("wrong_position", {"starts": [3]}, bytes_of(1), id="position ahead"),
        pytest.param("wrong_position", {"starts": [2, 1], "counts": [1, 1]}, bytes_of(2), id="new row ahead"),
        pytest.param("wrong_position", {"sources": [1]}, bytes_of(1), id="source that is not there"),
        pytest.param("wrong_position", {"sources": [2**31 - 1]}, bytes_of(1), id="source far beyond"),
        pytest.param("too_long", {"counts": [7]}, bytes_of(7), id="beyond max_length"),
        pytest.param("too_long", {"starts": [2**31 - 1]}, bytes_of(1), id="start far beyond"),
        pytest.param("too_long", {"counts": [2**31 - 1]}, bytes_of(1), id="count far beyond"),
        pytest.param("too_long", {"counts": [0]}, b"", id="no tokens"),
        pytest.param("wrong_shape", {}, b"", id="no payload"),
        pytest.param("wrong_shape", {}, bytes_of(1)[:-1], id="payload too short"),
        pytest.param("wrong_shape", {}, bytes_of(2), id="payload too long"),
        pytest.param("wrong_shape", {"format": WireFormat.BLOCKWISE8}, bytes_of(1), id="payload of another format"),
        pytest.param("wrong_shape", {"dtype": "bfloat16"}, bytes_of(1), id="payload of another dtype"),
        pytest.param("wrong_dtype", {"dtype": "float64"}, bytes_of(2), id="unknown dtype"),
        pytest.param("wrong_dtype", {"dtype": "__import__('os')"}, bytes_of(1), id="no dtype at all"),
        pytest.param("wrong_shape", {"starts": [2, 0]}, bytes_of(1), id="more starts than counts"),
        pytest.param("wrong_shape", {"counts": [1, 1]}, bytes_of(2), id="fewer starts than counts"),
        pytest.param("wrong_shape", {"sources": [0, 0]}, bytes_of(1), id="more sources than counts"),
        pytest.param("wrong_shape", {"offsets": [0, 0]}, bytes_of(1), id="more offsets than counts"),
    ],
)
def test_a_refused_step_changes_nothing(model, code, changes, payload):
    async def act(server):
        client = await (await server.client()).begin()
        free = server.sessions.free
        for _ in range(2):
            await client.refused(code, changed(STEP, **changes), payload)
        assert server.sessions.free == free
        await client.right_step()

    scenario(model, act)


def test_more_tokens_in_a_step_than_the_server_takes(model):
    async def act(server):
        client = await (await server.client()).begin(changed(OPEN, max_length=30))
        step = changed(STEP, counts=[17], format=WireFormat.FLOAT16)
        await client.refused("too_long", step, bytes_of(17, WireFormat.FLOAT16))
        await client.right_step(16)

    scenario(model, act)


def test_a_step_from_long_ago(model):
    async def act(server):
        client = await (await server.client()).begin()
        await client.right_step()
        await client.refused("wrong_position", changed(STEP, step=0, starts=[0]), bytes_of(1))
        await client.right_step()

    scenario(model, act)


def test_a_step_before_its_session(model):
    async def act(server):
        client = await server.client()
        await client.refused("unknown_session", changed(STEP, step=0, starts=[0]), bytes_of(1))
        await client.begin()

    scenario(model, act)


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
def test_a_forward_that_is_refused(model, code, changes, payload):
    async def act(server):
        client = await server.client()
        await client.refused(code, changed(FORWARD, **changes), payload)
        reply, _ = await client.ask(FORWARD, pack(random(3), WireFormat.NONE))
        assert isinstance(reply, messages.ForwardReply)

    scenario(model, act)


@pytest.mark.parametrize("begun", [False, True], ids=["fresh stream", "open session"])
@pytest.mark.parametrize(
    ("message", "payload"),
    [
        pytest.param(raw(b"\xc1garbage"), b"", id="garbage"),
        pytest.param(raw(b""), b"", id="empty header"),
        pytest.param(raw(b"\x91" * 100_000), b"", id="deep header"),
        pytest.param(raw(b"x" * (MAX_HEADER + 1)), b"", id="header too large"),
        pytest.param(messages.SessionOpened(0), b"", id="reply instead of a request"),
        pytest.param(messages.Refusal("peer_lost", "boo"), b"", id="refusal instead of a request"),
        pytest.param(changed(STEP, counts=[-1]), b"", id="negative count"),
        pytest.param(changed(STEP, counts=[1] * 5000), b"", id="too many rows"),
        pytest.param(changed(OPEN, session_id=b"short"), b"", id="short session id"),
        pytest.param(STEP, bytes(messages.MAX_PROBE + 1), id="payload larger than any step"),
    ],
)
def test_a_frame_that_is_no_request_ends_the_connection(model, message, payload, begun):
    async def act(server):
        client = await server.client()
        if begun:
            await client.begin()
        await client.refused("protocol_violation", message, payload)
        await client.is_over()
        # Its session is still there for a while, and it may come back for it.
        again = await server.client()
        assert await again.ask(OPEN) == (messages.SessionOpened(1 if begun else 0), b"")

    scenario(model, act)


def test_a_second_session_on_one_stream(model):
    async def act(server):
        client = await (await server.client()).begin()
        await client.refused("protocol_violation", changed(OPEN, session_id=b"another session!"))
        await client.is_over()
        assert len(server.sessions) == 2

    scenario(model, act)


def test_the_same_session_id_of_another_peer_is_another_session(model):
    async def act(server):
        mine = await (await server.client("me")).begin()
        thief = await (await server.client("thief")).begin(tokens=3)
        await mine.right_step()
        await thief.right_step(2)
        await thief.stream.send(messages.CloseSession())
        await thief.is_over()
        await mine.right_step()

    scenario(model, act)


def test_a_lost_reply_is_sent_again_and_not_computed_again(model, monkeypatch):
    calls = []
    forward = model.forward

    def counted(*args):
        calls.append(1)
        return forward(*args)

    monkeypatch.setattr(model, "forward", counted)

    async def act(server):
        client = await (await server.client()).begin()
        request = (STEP, pack(random(1, 7), WireFormat.NONE))
        first = await client.ask(*request)
        computed = len(calls)
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


def test_the_same_step_through_two_connections_at_once_is_computed_once(model):
    async def act(server):
        one = await (await server.client()).begin()
        two = await server.client()
        await two.ask(OPEN)
        payload = pack(random(1, 7), WireFormat.NONE)
        first, second = await asyncio.gather(one.ask(STEP, payload), two.ask(STEP, payload))
        assert isinstance(first[0], messages.StepReply)
        assert first == second
        one.history, one.steps = torch.cat([one.history, random(1, 7)]), 2
        await one.right_step()

    scenario(model, act)


@pytest.mark.parametrize("changes", [{"start": 2}, {"max_length": 9}], ids=str)
def test_an_open_session_cannot_be_opened_as_another_one(model, changes):
    async def act(server):
        client = await (await server.client()).begin()
        await (await server.client()).refused("wrong_span", changed(OPEN, **changes))
        await client.right_step()

    scenario(model, act)


def test_more_rows_than_there_is_room_for(model):
    async def act(server):
        client = await (await server.client()).begin()  # 8 of 24; the other client has 8
        text = await client.refused("cache_full", changed(STEP, starts=[2, 0, 0], counts=[1, 1, 1]), bytes_of(3))
        assert "16 tokens" in text
        assert "8 of 24 are free" in text
        await client.right_step()
        reply, _ = await client.ask(changed(STEP, step=2, starts=[3, 0], counts=[1, 1]), bytes_of(2))
        assert isinstance(reply, messages.StepReply)
        text = await (await server.client("late")).refused("cache_full", OPEN)
        assert "0 of 24 are free" in text

    scenario(model, act, capacity=24)


def test_a_vanished_clients_room_is_free_after_a_while(model):
    async def act(server):
        client = await (await server.client()).begin()
        (session,) = [one for one in server.sessions._sessions.values() if one.peer_id == "hostile"]
        client.stream.close()
        await server.until(lambda: session.attached == 0)
        server.now += GRACE
        server.sessions.expire()
        assert server.sessions.free == 64 - 16
        server.now += 1
        server.sessions.expire()
        assert server.sessions.free == 64 - 8

    scenario(model, act)


def test_an_expired_session_on_an_open_stream(model):
    async def whole():
        server = Server(model)
        await server.start()
        client = await (await server.client()).begin()
        server.now += IDLE + 1
        server.sessions.expire()
        await client.refused("unknown_session", STEP, bytes_of(1))
        again = await server.client()
        assert await again.ask(OPEN) == (messages.SessionOpened(0), b"")
        server.runtime.close()

    asyncio.run(whole())


def test_a_connection_to_a_closed_session_has_no_part_in_its_successor(model):
    """Else its rows would take cache that the accountant does not see."""

    async def act(server):
        old = await (await server.client()).begin()
        other = await server.client()
        await other.ask(OPEN)
        await other.stream.send(messages.CloseSession())
        await other.is_over()
        new = await (await server.client()).begin()
        await old.refused("unknown_session", changed(STEP, starts=[2, 0], counts=[1, 1]), bytes_of(2))
        old.stream.close()
        await new.right_step()
        assert server.sessions.free == 64 - 8 - 8

    scenario(model, act)


def test_a_leaving_server(model):
    async def whole():
        server = Server(model)
        await server.start()
        client = await (await server.client()).begin()
        payload = pack(random(1, 7), WireFormat.NONE)
        last = await client.ask(STEP, payload)
        server.handler.closing = True
        await client.refused("server_closing", changed(STEP, step=2, starts=[3]), bytes_of(1))
        assert await client.ask(STEP, payload) == last  # what it has computed, it hands out
        await (await server.client()).refused("server_closing", changed(OPEN, session_id=b"another session!"))
        await (await server.client()).refused("server_closing", FORWARD, bytes_of(3))
        reply, _ = await (await server.client()).ask(messages.InfoRequest())
        assert isinstance(reply, messages.InfoReply)
        server.runtime.close()

    asyncio.run(whole())


def test_a_step_that_comes_after_the_last_one_was_computed(model):
    async def whole():
        server = Server(model)
        await server.start()
        client = await (await server.client()).begin()
        server.runtime.close()
        await client.refused("server_closing", STEP, bytes_of(1))

    asyncio.run(whole())


@pytest.fixture
def poisonable(model, monkeypatch):
    """The model, which fails on one input after having written to the cache."""
    forward = model.forward

    def fragile(hidden, *args):
        output = forward(hidden, *args)
        if (hidden == POISON).any():
            raise RuntimeError("secret path /home/somebody")
        return output

    monkeypatch.setattr(model, "forward", fragile)
    return model


def test_a_computation_that_fails_is_told_to_its_client_alone(poisonable, caplog):
    async def act(server):
        client = await (await server.client()).begin()
        poison = pack(torch.full((1, HIDDEN), POISON), WireFormat.NONE)
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
        poison = pack(torch.full((1, HIDDEN), POISON), WireFormat.NONE)
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_values_that_spoil_only_ones_own_session(model, value):
    async def act(server):
        client = await (await server.client()).begin()
        reply, _ = await client.ask(STEP, pack(torch.full((1, HIDDEN), value), WireFormat.NONE))
        assert isinstance(reply, messages.StepReply)

    scenario(model, act)


def test_too_many_streams_of_one_peer(model):
    async def act(server):
        clients = [await server.client() for _ in range(2)]
        for client in clients:
            await client.ask(messages.InfoRequest())
        third = await server.client()
        frame = await asyncio.wait_for(third.stream.receive(), PATIENCE)
        refusal = messages.decode_server(frame.header)
        assert refusal.code == "server_fault"
        assert "2 streams" in refusal.message
        await third.is_over()

        await (await server.client("somebody else")).ask(messages.InfoRequest())
        clients[0].stream.close()
        await clients[0].is_over()
        await (await server.client()).begin()

    scenario(model, act, streams=2)


def test_a_client_that_leaves_in_the_middle_of_a_frame(model):
    async def act(server):
        client = await (await server.client()).begin()
        (session,) = [one for one in server.sessions._sessions.values() if one.peer_id == "hostile"]
        client.stream._writer.write(b"\x00\x00")
        client.stream.close()
        await server.until(lambda: session.attached == 0)

    scenario(model, act)


def test_closing_without_a_session(model):
    async def act(server):
        client = await server.client()
        await client.stream.send(messages.CloseSession())
        await client.is_over()

    scenario(model, act)


def test_a_step_number_is_not_answered_for_another_step(model):
    """The reply is kept for a request that is sent again, not for one that happens to have its number."""

    async def scenario() -> None:
        server = Server(model)
        await server.start()
        client = await (await server.client()).begin()
        first, other = random(1, seed=1), random(1, seed=2)
        reply, payload = await client.ask(STEP, pack(first, WireFormat.NONE))
        assert isinstance(reply, messages.StepReply)
        refused, _ = await client.ask(STEP, pack(other, WireFormat.NONE))
        assert isinstance(refused, messages.Refusal)
        assert refused.code == "wrong_position"
        again, same = await client.ask(STEP, pack(first, WireFormat.NONE))
        assert (again, same) == (reply, payload)

    asyncio.run(scenario())


def test_positions_beyond_a_table_are_refused(tmp_path):
    folder = zoo.make_checkpoint("gptj", tmp_path)
    model = load_span(open_checkpoint(folder), SPAN, dtype=torch.float32, device=CPU)
    limit = model.positions
    assert limit is not None

    async def scenario() -> None:
        server = Server(model, capacity=2 * limit)
        await server.start()
        client = await server.client()
        hidden = torch.zeros(1, model.hidden_size)
        forward = changed(FORWARD, counts=[1], offsets=[limit - 1])
        reply, _ = await client.ask(forward, pack(hidden, WireFormat.NONE))
        assert isinstance(reply, messages.ForwardReply)
        refused, _ = await client.ask(changed(forward, offsets=[limit]), pack(hidden, WireFormat.NONE))
        assert isinstance(refused, messages.Refusal)
        assert refused.code == "too_long"

    asyncio.run(scenario())
