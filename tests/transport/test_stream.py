from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import PeerLost, PeerTimeout, ProtocolViolation
from swarm.protocol import messages
from swarm.protocol.framing import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PREFIX_BYTES, encode_prefix
from swarm.transport.stream import FRAME_TIMEOUT_S, MIN_RECEIVED_BYTES_PER_S, FrameStream
from tests import virtual_time
from tests.memory_hub import stream_pair

HELLO = messages.Refusal("hello", "a message with a text")
SOON = 60.0


class Deaf:
    """A writer whose every use fails as a broken transport's does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def write(self, data: bytes | memoryview) -> None:
        raise self.error

    def close(self) -> None:
        pass


def reading(data: bytes, end: bool = False) -> FrameStream:
    """A stream on which exactly these bytes have come so far."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if end:
        reader.feed_eof()
    writer: Any = Deaf(AssertionError("nothing may be written"))
    return FrameStream("peer", reader, writer)


@given(st.lists(st.binary(max_size=2000), max_size=10))
@settings(deadline=None)
def test_frames_arrive_whole_and_in_order(payloads):
    async def scenario():
        ours, theirs = stream_pair("us", "them")
        for number, payload in enumerate(payloads):
            await ours.send(messages.SessionOpened(number), payload)
        for number, payload in enumerate(payloads):
            frame = await theirs.receive()
            assert messages.decode_server(frame.header) == messages.SessionOpened(number)
            assert frame.payload == payload

    asyncio.run(scenario())


def test_a_payload_may_be_any_buffer_and_arrives_before_the_end():
    async def scenario():
        ours, theirs = stream_pair("us", "them")
        await ours.send(HELLO, memoryview(bytearray(b"xyz")))
        await ours.send(HELLO, memoryview(b""))
        ours.close()
        assert [(await theirs.receive()).payload for _ in range(2)] == [b"xyz", b""]
        with pytest.raises(PeerLost):
            await theirs.receive()

    asyncio.run(scenario())


def test_a_frame_that_comes_in_single_bytes():
    async def scenario():
        header = messages.encode(HELLO)
        reader = asyncio.StreamReader()
        writer: Any = Deaf(AssertionError())
        waiting = asyncio.create_task(FrameStream("peer", reader, writer).receive())
        for byte in encode_prefix(len(header), 3) + header + b"end":
            assert not waiting.done()
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        frame = await asyncio.wait_for(waiting, SOON)
        assert (frame.header, frame.payload) == (header, b"end")

    asyncio.run(scenario())


def test_too_large_a_frame_is_refused_before_it_comes():
    async def scenario():
        for prefix, limit in [
            (encode_prefix(MAX_HEADER_BYTES + 1, 0), MAX_PAYLOAD_BYTES),
            (encode_prefix(1, MAX_PAYLOAD_BYTES + 1), MAX_PAYLOAD_BYTES),
            (encode_prefix(1, 101), 100),
            (encode_prefix(1, 1), 0),
        ]:
            with pytest.raises(ProtocolViolation, match="announced"):
                await asyncio.wait_for(reading(prefix).receive(limit), SOON)

    asyncio.run(scenario())


def test_a_stream_that_ends_inside_of_a_frame():
    async def scenario():
        for length in range(0, 12 + 25, 3):
            header = messages.encode(HELLO)
            whole = encode_prefix(len(header), 4) + header + b"tail"
            assert length < len(whole)
            with pytest.raises(PeerLost, match="closed the connection"):
                await asyncio.wait_for(reading(whole[:length], end=True).receive(), SOON)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), RuntimeError("closed")])
def test_sending_into_a_broken_connection(error):
    async def scenario():
        writer: Any = Deaf(error)
        with pytest.raises(PeerLost, match="…longid broke"):
            await FrameStream("averylongid", asyncio.StreamReader(), writer).send(HELLO)

    asyncio.run(scenario())


def arriving(pace, payload: int = 20 * MIN_RECEIVED_BYTES_PER_S, admitted_after: float = 0.0) -> tuple[Any, float]:
    """What comes of a frame whose bytes arrive as `pace(feed, header, payload)` has them, and when."""

    outcome: list[tuple[Any, float]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        header = messages.encode(HELLO)
        ours, theirs = stream_pair("us", "them")

        async def admit(seen: bytes, length: int) -> None:
            assert (seen, length) == (header, payload)
            await asyncio.sleep(admitted_after)

        def feed(data: bytes) -> None:
            ours._writer.write(data)

        feeding = asyncio.create_task(pace(feed, encode_prefix(len(header), payload) + header, bytes(payload)))
        try:
            found: Any = await theirs.receive(admit=admit)
        except PeerLost as error:
            found = error
        outcome.append((found, loop.time()))
        feeding.cancel()

    virtual_time.run(scenario)
    return outcome[0]


async def at_rate(feed, head: bytes, payload: bytes, rate: float) -> None:
    feed(head)
    for first in range(0, len(payload), MIN_RECEIVED_BYTES_PER_S):
        await asyncio.sleep(MIN_RECEIVED_BYTES_PER_S / rate)
        feed(payload[first : first + MIN_RECEIVED_BYTES_PER_S])


def test_a_slow_uplink_is_quick_enough():
    """Half a megabit a second, shared by fifteen streams."""
    frame, ended = arriving(lambda *args: at_rate(*args, rate=0.5e6 / 8 / 15))
    assert len(frame.payload) == 20 * MIN_RECEIVED_BYTES_PER_S
    assert ended > 19


def test_a_payload_that_drips_ends_the_stream():
    error, ended = arriving(lambda *args: at_rate(*args, rate=0.5 * MIN_RECEIVED_BYTES_PER_S))
    assert isinstance(error, PeerTimeout)
    assert ended == FRAME_TIMEOUT_S + 20


def test_a_header_that_never_comes_ends_the_stream():
    async def only_the_prefix(feed, head: bytes, payload: bytes) -> None:
        feed(head[: PREFIX_BYTES + 3])

    error, ended = arriving(only_the_prefix)
    assert isinstance(error, PeerTimeout)
    assert ended == FRAME_TIMEOUT_S


def test_a_stream_may_wait_for_its_next_frame_for_ever():
    async def late(feed, head: bytes, payload: bytes) -> None:
        await asyncio.sleep(3000.0)
        feed(head + payload)

    frame, ended = arriving(late)
    assert (len(frame.payload), ended) == (20 * MIN_RECEIVED_BYTES_PER_S, 3000.0)


def test_the_time_that_a_frame_waits_to_be_admitted_is_not_the_senders():
    async def at_once(feed, head: bytes, payload: bytes) -> None:
        feed(head + payload)

    frame, ended = arriving(at_once, admitted_after=1000.0)
    assert (len(frame.payload), ended) == (20 * MIN_RECEIVED_BYTES_PER_S, 1000.0)
