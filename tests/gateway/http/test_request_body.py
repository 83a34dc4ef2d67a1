"""Bodies that are bounded in size, time and memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.http.request_body import (
    CHARACTER_BYTES,
    RequestMemory,
    RequestRoom,
    decoded_bytes,
)
from swarm.gateway.http.responses import ClientDisconnected
from swarm.gateway.openai.api_errors import (
    BadRequest,
    PayloadTooLarge,
    RequestTimeout,
    ServiceUnavailable,
    UnsupportedMediaType,
)
from tests.gateway.http.fake_client import Client, run


def test_a_body_is_read():
    async def work() -> None:
        assert await Client([b"ab", b"cd"]).read() == b"abcd"

    run(work)


def packed(body: bytes) -> list[bytes]:
    """As gzip, in parts of three bytes."""
    whole = gzip.compress(body)
    return [whole[at : at + 3] for at in range(0, len(whole), 3)]


GZIP = [("content-encoding", "gzip")]


def test_a_body_that_is_packed_is_unpacked():
    async def work() -> None:
        memory = RequestMemory(1000)
        with RequestRoom(memory, None) as room:
            assert await Client(packed(b"abcd" * 10), headers=GZIP).read(100, room=room) == b"abcd" * 10
            assert memory.free_bytes == 1000 - 40 * (1 + CHARACTER_BYTES)

    run(work)


@pytest.mark.parametrize(
    ("parts", "encoding", "error"),
    [
        (packed(b"a" * 1_000_000), "gzip", PayloadTooLarge),
        ([gzip.compress(b"a" * 10_000_000)], "gzip", PayloadTooLarge),
        (packed(b"a" * 30)[:-1], "gzip", BadRequest),
        ([gzip.compress(b"a") * 2], "gzip", BadRequest),
        ([b"{}"], "gzip", BadRequest),
        ([b"{}"], "br", UnsupportedMediaType),
        ([b"{}"], "gzip, gzip", UnsupportedMediaType),
    ],
)
def test_packed_bodies_that_are_refused(parts, encoding, error):
    async def work() -> None:
        memory = RequestMemory(10_000_000)
        tracemalloc.start()
        with pytest.raises(error), RequestRoom(memory, None) as room:
            await Client(parts, headers=[("content-encoding", encoding)]).read(20_000, room=room)
        assert memory.free_bytes == 10_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # little more than the limit was unpacked

    try:
        run(work)
    finally:
        tracemalloc.stop()


class DrippingClient(Client):
    """Sends two bytes at a time."""

    left_to_send = 100_000

    async def receive(self) -> dict[str, Any]:
        self.left_to_send -= 1
        return {"type": "http.request", "body": b"%02d" % (self.left_to_send % 100), "more_body": self.left_to_send > 0}


def test_a_body_in_tiny_parts_takes_no_more_than_what_it_holds():
    """As a list of parts it took twenty times its bytes."""
    memory = RequestMemory(10**8)
    room = RequestRoom(memory, None)

    async def work() -> None:
        tracemalloc.start()
        assert len(await DrippingClient().read(10**6, room=room)) == 200_000

    try:
        run(work)
        assert tracemalloc.get_traced_memory()[1] < 10**8 - memory.free_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("headers", [[], [("content-length", "11")], [("content-length", "9" * 400)]])
def test_a_body_that_is_too_large(headers):
    async def work() -> None:
        with pytest.raises(PayloadTooLarge, match="larger than 10 bytes"):
            await Client([b"123456", b"78901"], headers=headers).read()

    run(work)


def test_a_body_that_does_not_arrive():
    async def work() -> None:
        with pytest.raises(RequestTimeout, match="did not arrive within 0 s"):
            await Client().read(seconds=0.01)

    run(work)


def test_a_client_that_disconnects_before_its_body_is_complete():
    async def work() -> None:
        with pytest.raises(ClientDisconnected):
            await Client([b"a"], leaves=True).read()

    run(work)


BODY = 10 * (1 + CHARACTER_BYTES)
"""What a body of 10 characters takes, as it is and decoded."""


def test_a_body_holds_its_room_until_it_is_given_back():
    async def work() -> None:
        memory = RequestMemory(BODY)
        for _ in range(3):
            with RequestRoom(memory, None) as room, RequestRoom(memory, None) as other:
                assert await Client([b"12345", b"67890"]).read(room=room) == b"1234567890"
                assert memory.free_bytes == 0
                with pytest.raises(ServiceUnavailable, match="too many large requests at once"):
                    await Client([b"1"]).read(room=other)
                room.release()
                assert await Client([b"1"]).read(room=other) == b"1"
            assert memory.free_bytes == BODY

    run(work)


def test_whatever_becomes_of_a_body_its_room_is_free_again():
    async def work() -> None:
        memory = RequestMemory(BODY)
        for client, error in (
            (Client([b"1234567"], leaves=True), ClientDisconnected),
            (Client([b"123456", b"78901"]), PayloadTooLarge),
        ):
            with pytest.raises(error), RequestRoom(memory, "ann") as room:
                await client.read(room=room)
            assert memory.free_bytes == BODY

    run(work)


def test_one_key_gets_half_of_the_room():
    memory = RequestMemory(100)
    with RequestRoom(memory, "ann") as first, RequestRoom(memory, "ann") as second, RequestRoom(memory, "bob") as other:
        first.hold(40)
        with pytest.raises(ServiceUnavailable):
            second.hold(11)
        second.hold(10)
        other.hold(50)
        with pytest.raises(ServiceUnavailable):
            other.hold(1)
    assert memory.free_bytes == 100


def test_what_never_fits_is_refused_for_good():
    memory = RequestMemory(100)
    with RequestRoom(memory, "ann") as room, pytest.raises(PayloadTooLarge, match="takes too much memory"):
        room.hold(51)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=8),
    max_leaves=40,
)


@given(VALUES, st.integers(20, 200))
def test_decoded_values_take_no_more_than_is_charged_for_them(value, times):
    """Many copies, so that what Python shares between small values or keeps for itself does not count."""
    body = json.dumps([value] * times, separators=(",", ":"), ensure_ascii=False).encode()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        decoded = msgspec.json.decode(body)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decoded) == times
    assert after - before <= decoded_bytes(body) + 4096
