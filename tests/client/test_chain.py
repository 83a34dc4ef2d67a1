"""The client's side of the conversation, against servers that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from swarm import errors
from swarm.client.chain import Chain, HopSession, Manner, Packed, forward
from swarm.data_structures import Hop, Route, ServerInfo, ServerState, Span, StepLayout, WireFormat
from swarm.errors import PeerLost, ProtocolViolation, RemoteError, ServerFault
from swarm.protocol import messages
from swarm.transport.memory import MemoryHub, MemoryNetwork
from swarm.transport.stream import Stream

HIDDEN, PATIENCE, SHORT = 4, 20.0, 0.05
LAYOUT = StepLayout((0, 0), (2, 1))
MANNER = Manner("main", WireFormat.FLOAT16, PATIENCE)
INPUT = Packed(b"i" * 48, 3, HIDDEN, WireFormat.NONE, "float32")
OUTPUT = b"o" * 24
"""Three tokens of four values in 16 bits."""

OPENED = (messages.SessionOpened(0), b"")
Answer = tuple[Any, bytes] | str | None
"""A reply and its payload, None for silence, or "hang up"."""


def reply(step: int = 0, payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(messages.StepReply(step, WireFormat.FLOAT16, "float32", 1.0), **changes), payload


def forward_reply(payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(messages.ForwardReply(WireFormat.FLOAT16, "float32", 1.0), **changes), payload


class FakeServer:
    """Answers the first request of each stream with the first answer, and so on; then it is silent."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.requests: list[tuple[messages.ClientMessage, bytes]] = []
        self.open_streams = 0
        self.ended = asyncio.Event()

    async def __call__(self, stream: Stream) -> None:
        self.open_streams += 1
        answers = iter(self.answers)
        try:
            while True:
                frame = await stream.receive()
                self.requests.append((messages.decode_client(frame.header), bytes(frame.payload)))
                answer = next(answers, None)
                if answer == "hang up":
                    return
                if answer is not None:
                    await stream.send(*answer)
        except PeerLost:
            pass
        finally:
            stream.close()
            self.open_streams -= 1
            self.ended.set()

    @property
    def asked(self) -> list[type]:
        return [type(message) for message, _ in self.requests]


def hop(name: str = "server", span: Span | None = None) -> Hop:
    span = span or Span(0, 3)
    info = ServerInfo(
        peer_id=name,
        span=span,
        state=ServerState.ONLINE,
        throughput=1.0,
        cache_tokens_free=0,
        revision="main",
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version="1",
    )
    return Hop(info, span)


class Swarm:
    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.network = MemoryNetwork(self.hub, "client")

    async def add(self, *answers: Answer, name: str = "server") -> FakeServer:
        server = FakeServer(*answers)
        await MemoryNetwork(self.hub, name).serve(server)
        return server


def run(scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def whole() -> None:
        swarm = Swarm()
        async with asyncio.timeout(PATIENCE):
            await scenario(swarm)
        for task in swarm.hub.tasks:
            task.cancel()

    asyncio.run(whole())


def session(swarm: Swarm, manner: Manner = MANNER) -> HopSession:
    return HopSession(swarm.network, hop(), manner, 100)


def test_a_session_says_what_it_wants_and_hands_on_what_it_gets():
    async def scenario(swarm):
        server = await swarm.add(OPENED, reply(0), reply(1, b"p" * 24))
        one = session(swarm)
        await one.open()
        assert await one.step(INPUT, LAYOUT) == Packed(OUTPUT, 3, HIDDEN, WireFormat.FLOAT16, "float32")
        second = StepLayout((2, 1), (1, 2), (1, 0), (5, 0))
        assert (await one.step(INPUT, second)).payload == b"p" * 24
        await one.close()
        await server.ended.wait()
        (opened, _), first_step, second_step, (closed, _) = server.requests
        assert (opened.revision, opened.start, opened.end, opened.max_length) == ("main", 0, 3, 100)
        assert opened.reply_format is WireFormat.FLOAT16
        assert first_step == (
            messages.StepRequest(0, [0, 0], [2, 1], WireFormat.NONE, "float32"),
            INPUT.payload,
        )
        assert second_step[0] == messages.StepRequest(1, [2, 1], [1, 2], WireFormat.NONE, "float32", [1, 0], [5, 0])
        assert closed == messages.CloseSession()

    run(scenario)


def test_every_session_has_an_id_of_its_own():
    async def scenario(swarm):
        server = await swarm.add(OPENED)
        for _ in range(5):
            await session(swarm).open()
        assert len({message.session_id for message, _ in server.requests}) == 5

    run(scenario)


def test_a_session_that_goes_on_where_it_was():
    async def scenario(swarm):
        server = await swarm.add((messages.SessionOpened(7), b""), reply(7))
        one = session(swarm)
        await one.open()
        await one.step(INPUT, LAYOUT)
        assert server.requests[1][0].step == 7

    run(scenario)


BAD_REPLIES = [
    pytest.param((messages.InfoReply(0, 3, 0, 0, "1"), b""), "InfoReply out of place", id="wrong type"),
    pytest.param(OPENED, "SessionOpened out of place", id="reply to another request"),
    pytest.param((msgspec.Raw(b"\xc1"), b""), "not a valid reply", id="garbage"),
    pytest.param((messages.InfoRequest(), b""), "not a valid reply", id="request instead of a reply"),
    pytest.param((messages.InfoRequest(), b"x" * 1000), "payload of 1000 bytes", id="more than could be right"),
]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        *BAD_REPLIES,
        pytest.param(forward_reply(), "ForwardReply out of place", id="reply to a forward"),
        pytest.param(reply(1), "StepReply out of place", id="number ahead"),
        pytest.param(reply(0, b""), "0 bytes where 24 were due", id="no payload"),
        pytest.param(reply(0, OUTPUT[:-1]), "23 bytes where 24", id="payload too short"),
        pytest.param(reply(0, OUTPUT + b"x"), "25 bytes where 24", id="payload too long"),
        pytest.param(reply(0, format=WireFormat.NONE), "24 bytes where 48", id="payload of another format"),
        pytest.param(reply(0, dtype="float64"), "unknown format", id="unknown dtype"),
    ],
)
def test_a_server_that_answers_a_step_wrongly(answer, why):
    async def scenario(swarm):
        await swarm.add(OPENED, answer)
        one = session(swarm)
        await one.open()
        with pytest.raises(ProtocolViolation, match=why):
            await one.step(INPUT, LAYOUT)
        await one.close()

    run(scenario)


def test_a_server_that_repeats_an_older_step():
    async def scenario(swarm):
        await swarm.add(OPENED, reply(0), reply(0))
        one = session(swarm)
        await one.open()
        await one.step(INPUT, LAYOUT)
        with pytest.raises(ProtocolViolation, match="out of place"):
            await one.step(INPUT, LAYOUT)

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(reply(), "payload of 24 bytes", id="payload where none is due"),
        pytest.param(reply(0, b""), "StepReply out of place", id="wrong type"),
        pytest.param((msgspec.Raw(b""), b""), "not a valid reply", id="garbage"),
    ],
)
def test_a_server_that_answers_the_opening_wrongly(answer, why):
    async def scenario(swarm):
        await swarm.add(answer)
        with pytest.raises(ProtocolViolation, match=why):
            await session(swarm).open()

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        *BAD_REPLIES,
        pytest.param(reply(), "StepReply out of place", id="reply to a step"),
        pytest.param(forward_reply(OUTPUT[:-1]), "23 bytes where 24", id="payload too short"),
        pytest.param(forward_reply(dtype="int8"), "unknown format", id="unknown dtype"),
    ],
)
def test_a_server_that_answers_a_forward_wrongly(answer, why):
    async def scenario(swarm):
        server = await swarm.add(answer)
        with pytest.raises(ProtocolViolation, match=why):
            await forward(swarm.network, hop(), MANNER, INPUT, LAYOUT)
        await server.ended.wait()

    run(scenario)


def test_a_forward_says_what_it_wants_and_leaves():
    async def scenario(swarm):
        server = await swarm.add(forward_reply())
        layout = StepLayout((0, 0), (2, 1), None, (4, 0))
        output = await forward(swarm.network, hop(), MANNER, INPUT, layout)
        assert output == Packed(OUTPUT, 3, HIDDEN, WireFormat.FLOAT16, "float32")
        await server.ended.wait()
        assert server.requests == [
            (
                messages.ForwardRequest(
                    "main", 0, 3, [2, 1], WireFormat.NONE, "float32", WireFormat.FLOAT16, offsets=[4, 0]
                ),
                INPUT.payload,
            )
        ]

    run(scenario)


def remote_errors(root: type[RemoteError] = RemoteError) -> list[type[RemoteError]]:
    return [root, *(found for child in root.__subclasses__() for found in remote_errors(child))]


@pytest.mark.parametrize("kind", remote_errors())
def test_a_refusal_is_raised_as_the_error_it_was(kind):
    async def scenario(swarm):
        refusal = (messages.refusal(kind("because")), b"")
        await swarm.add(OPENED, refusal, reply(0))
        await swarm.add(refusal, name="strict")
        one = session(swarm)
        await one.open()
        strict = HopSession(swarm.network, hop("strict"), MANNER, 100)
        for request in (
            one.step(INPUT, LAYOUT),
            strict.open(),
            forward(swarm.network, hop("strict"), MANNER, INPUT, LAYOUT),
        ):
            with pytest.raises(RemoteError, match=r"server …\w+ \(blocks 0:3\) refused: because") as caught:
                await request
            assert type(caught.value) is kind
        if issubclass(kind, (errors.RequestRefused, ServerFault)):  # the refused step does not count
            assert (await one.step(INPUT, LAYOUT)).payload == OUTPUT

    run(scenario)


def test_an_unknown_refusal_is_the_servers_fault():
    async def scenario(swarm):
        await swarm.add((messages.Refusal("from_the_future", "because"), b""))
        with pytest.raises(ServerFault, match="because"):
            await session(swarm).open()

    run(scenario)


@pytest.mark.parametrize(("answer", "why"), [(None, "did not answer within"), ("hang up", "is gone")])
def test_a_server_that_does_not_answer(answer, why):
    async def scenario(swarm):
        manner = Manner("main", WireFormat.NONE, SHORT if answer is None else PATIENCE)
        await swarm.add(answer)
        await swarm.add(OPENED, answer, name="later")
        later = HopSession(swarm.network, hop("later"), manner, 100)
        await later.open()
        for request in (
            session(swarm, manner).open(),
            later.step(INPUT, LAYOUT),
            forward(swarm.network, hop(), manner, INPUT, LAYOUT),
        ):
            with pytest.raises(PeerLost, match=why):
                await request
        await later.close()

    run(scenario)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one():
    async def scenario(swarm):
        hurry = asyncio.Event()

        async def slow(stream):
            await stream.receive()
            await stream.send(*OPENED)
            await stream.receive()
            await hurry.wait()
            await stream.send(*reply(0))
            await stream.receive()
            await stream.send(*reply(0))

        await MemoryNetwork(swarm.hub, "server").serve(slow)
        one = session(swarm, Manner("main", WireFormat.NONE, SHORT))
        await one.open()
        with pytest.raises(PeerLost):
            await one.step(INPUT, LAYOUT)
        hurry.set()
        other = Packed(b"i" * 16, 1, HIDDEN, WireFormat.NONE, "float32")
        with pytest.raises(RemoteError):
            await one.step(other, StepLayout((0,), (1,)))

    run(scenario)


def test_an_interrupted_steps_answer_is_not_taken_for_the_next_ones():
    """As when somebody presses Ctrl-C in a notebook, and then asks something else in the same session."""

    async def scenario(swarm):
        began, go_on = asyncio.Event(), asyncio.Event()

        async def server(stream):
            await stream.receive()
            await stream.send(*OPENED)
            while True:
                frame = await stream.receive()
                began.set()
                await go_on.wait()
                await stream.send(*reply(0, frame.payload[:24]))

        async def serve(stream):
            with suppress(PeerLost):
                await server(stream)

        await MemoryNetwork(swarm.hub, "server").serve(serve)
        one = session(swarm)
        await one.open()
        interrupted = asyncio.create_task(one.step(INPUT, LAYOUT))
        await began.wait()
        interrupted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await interrupted
        go_on.set()
        other = Packed(b"x" * 48, 3, HIDDEN, WireFormat.NONE, "float32")
        with suppress(PeerLost):  # right too: the session is over
            assert (await one.step(other, LAYOUT)).payload == b"x" * 24

    run(scenario)


def test_a_server_that_cannot_be_reached():
    async def scenario(swarm):
        with pytest.raises(PeerLost, match="cannot be reached"):
            await session(swarm).open()
        with pytest.raises(PeerLost, match="cannot be reached"):
            await forward(swarm.network, hop(), MANNER, INPUT, LAYOUT)

    run(scenario)


def test_a_session_is_used_between_opening_and_closing():
    async def scenario(swarm):
        server = await swarm.add(OPENED)
        one = session(swarm)
        with pytest.raises(PeerLost, match="not connected"):
            await one.step(INPUT, LAYOUT)
        await one.open()
        await one.close()
        await one.close()
        with pytest.raises(PeerLost, match="not connected"):
            await one.step(INPUT, LAYOUT)
        await server.ended.wait()
        assert server.asked == [messages.OpenSession, messages.CloseSession]

    run(scenario)


def test_a_server_that_has_gone_does_not_disturb_the_closing():
    async def scenario(swarm):
        server = await swarm.add(OPENED, "hang up")
        one = session(swarm)
        await one.open()
        with pytest.raises(PeerLost):
            await one.step(INPUT, LAYOUT)
        await server.ended.wait()
        await one.close()

    run(scenario)


class Stuck:
    """The stream to a server that has stopped reading: once its buffers are full, nothing more can be sent."""

    def __init__(self, stream: Stream) -> None:
        self.peer_id = stream.peer_id
        self.closed = False
        self._stream = stream

    async def send(self, message: messages.Message, payload: bytes | memoryview = b"") -> None:
        if not isinstance(message, messages.OpenSession):
            await asyncio.Event().wait()
        await self._stream.send(message, payload)

    async def receive(self, max_payload: int = 0) -> Any:
        return await self._stream.receive(max_payload)

    def close(self) -> None:
        self.closed = True
        self._stream.close()


def test_a_server_that_has_stopped_reading_does_not_hold_up_the_closing():
    async def scenario(swarm):
        await swarm.add(OPENED)
        stream = Stuck(await swarm.network.open_stream("server"))

        class Network:
            peer_id = "client"

            async def open_stream(self, peer_id: str) -> Stuck:
                return stream

        one = HopSession(Network(), hop(), Manner("main", WireFormat.NONE, SHORT), 100)
        await one.open()
        with pytest.raises(PeerLost, match="did not answer"):
            await one.step(INPUT, LAYOUT)
        await asyncio.wait_for(one.close(), PATIENCE / 2)
        assert stream.closed

    run(scenario)


def route() -> Route:
    return Route((hop("one", Span(0, 2)), hop("two", Span(2, 3)), hop("three", Span(3, 6))))


def test_a_chain_hands_the_answer_of_one_to_the_next_as_it_came():
    async def scenario(swarm):
        one = await swarm.add(OPENED, reply(0, b"1" * 24), name="one")
        two = await swarm.add(OPENED, reply(0, b"2" * 12 + b"\0" * 4, format=WireFormat.BLOCKWISE8), name="two")
        three = await swarm.add(OPENED, reply(0, b"3" * 24), name="three")
        chain = Chain(swarm.network, route(), MANNER, 100)
        await chain.open()
        assert chain.timings == ()
        output = await chain.step(INPUT, LAYOUT)
        assert [timing.compute for timing in chain.timings] == [0.001] * 3
        assert all(timing.total > 0 for timing in chain.timings)
        assert output == Packed(b"3" * 24, 3, HIDDEN, WireFormat.FLOAT16, "float32")
        assert [server.requests[1][1] for server in (one, two, three)] == [
            INPUT.payload,
            b"1" * 24,
            b"2" * 12 + b"\0" * 4,
        ]
        assert [server.requests[1][0].format for server in (one, two, three)] == ["none", "float16", "blockwise8"]
        assert [(r.start, r.end) for r in (server.requests[0][0] for server in (one, two, three))] == [
            (0, 2),
            (2, 3),
            (3, 6),
        ]
        await chain.close()
        for server in (one, two, three):
            await server.ended.wait()
            assert server.asked[-1] is messages.CloseSession

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((messages.Refusal("cache_full", "no room"), b""), errors.CacheFull),
        ("hang up", PeerLost),
        (None, PeerLost),
        (reply(0, b""), ProtocolViolation),
    ],
    ids=["refused", "hung up", "silent", "wrong"],
)
def test_one_hop_that_cannot_be_opened_closes_the_others(answer, kind):
    async def scenario(swarm):
        one = await swarm.add(OPENED, name="one")
        two = await swarm.add(answer, name="two")
        three = await swarm.add(OPENED, name="three")
        chain = Chain(swarm.network, route(), Manner("main", WireFormat.NONE, 0.5), 100)
        with pytest.raises(kind):
            await chain.open()
        assert chain.failed == {"two"}
        for server in (one, two, three):
            await server.ended.wait()
            assert server.open_streams == 0
        for server in (one, three):
            assert server.asked == [messages.OpenSession, messages.CloseSession]

    run(scenario)


def test_a_hop_that_cannot_be_reached_closes_the_others():
    async def scenario(swarm):
        one = await swarm.add(OPENED, name="one")
        three = await swarm.add(OPENED, name="three")
        chain = Chain(swarm.network, route(), MANNER, 100)
        with pytest.raises(PeerLost, match="cannot be reached"):
            await chain.open()
        assert chain.failed == {"two"}
        for server in (one, three):
            await server.ended.wait()

    run(scenario)


def test_a_step_that_fails_half_way_goes_no_further():
    async def scenario(swarm):
        await swarm.add(OPENED, reply(0), name="one")
        await swarm.add(OPENED, (messages.Refusal("too_long", "no"), b""), name="two")
        three = await swarm.add(OPENED, reply(0), name="three")
        chain = Chain(swarm.network, route(), MANNER, 100)
        await chain.open()
        with pytest.raises(errors.TooLong, match="blocks 2:3"):
            await chain.step(INPUT, LAYOUT)
        await chain.close()
        await three.ended.wait()
        assert three.asked == [messages.OpenSession, messages.CloseSession]

    run(scenario)
