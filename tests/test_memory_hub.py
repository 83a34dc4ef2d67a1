"""Peers in memory: what they promise where all is well, and what others see of each fault. Times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.transport.stream import Stream
from tests import virtual_time
from tests.memory_hub import MAX_UNREAD_BYTES, MemoryHub, MemoryNetwork


def test_a_handler_sees_who_calls_and_its_answer_comes_back():
    async def scenario():
        hub = MemoryHub()
        server, client = MemoryNetwork(hub, "server"), MemoryNetwork(hub, "client")

        async def handler(stream):
            frame = await stream.receive()
            await stream.send(messages.Refusal("who", stream.peer_id), bytes(frame.payload)[::-1])

        await server.serve(handler)
        stream = await client.open_stream("server")
        assert stream.peer_id == "server"
        await stream.send(messages.InfoRequest(), b"abc")
        frame = await stream.receive()
        assert messages.decode_server(frame.header) == messages.Refusal("who", "client")
        assert frame.payload == b"cba"

    asyncio.run(scenario())


HELLO = messages.InfoRequest()


def now() -> float:
    return asyncio.get_running_loop().time()


class Swarm:
    """A client and a peer "echo", which sends back whatever it gets."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.client = MemoryNetwork(hub, "client")
        self.heard: list[bytes] = []
        self.ends: list[str] = []

    async def __call__(self, stream: Stream) -> None:
        try:
            while True:
                frame = await stream.receive()
                self.heard.append(bytes(frame.payload))
                await stream.send(HELLO, frame.payload)
        except PeerLost:
            self.ends.append("lost")
            raise
        except asyncio.CancelledError:
            self.ends.append("killed")
            raise


def run(scenario: Callable[[Swarm], Awaitable[None]], **options: object) -> None:
    async def whole() -> None:
        swarm = Swarm(MemoryHub(**options))
        await MemoryNetwork(swarm.hub, "echo").serve(swarm)
        await scenario(swarm)
        await swarm.hub.close()
        assert all(task.done() for task in swarm.hub.tasks)

    virtual_time.run(whole)


def there_and_back(source: str, target: str) -> float:
    return {("client", "echo"): 0.2, ("echo", "client"): 0.3}[source, target]


def test_each_direction_has_its_delay():
    async def scenario(swarm):
        stream = await swarm.client.open_stream("echo")
        assert now() == pytest.approx(0.5)  # one round trip
        began = now()
        await stream.send(HELLO, b"x")
        assert now() == began  # sending does not wait
        await stream.receive()
        assert now() - began == pytest.approx(0.5)

    run(scenario, delay=there_and_back)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_whatever_the_delays_nothing_is_overtaken(waits):
    """Pauses before each message, and the delay that rules when it is sent."""
    delays = iter([0.0, 0.0])

    async def scenario():
        hub = MemoryHub(lambda source, target: next(delays))
        received = []
        done = asyncio.Event()

        async def handler(stream):
            for _ in waits:
                received.append((bytes((await stream.receive()).payload), now()))
            done.set()
            await stream.receive()

        await MemoryNetwork(hub, "server").serve(handler)
        stream = await MemoryNetwork(hub, "client").open_stream("server")
        earliest = []
        for number, (pause, delay) in enumerate(waits):
            await asyncio.sleep(pause)
            hub.delay = lambda source, target, delay=delay: delay
            await stream.send(HELLO, bytes([number]))
            earliest.append(now() + delay)
        await done.wait()
        assert [payload for payload, _ in received] == [bytes([number]) for number in range(len(waits))]
        due = 0.0
        for (_, at), time in zip(received, earliest, strict=True):
            due = max(due, time)
            assert at == pytest.approx(due, abs=1e-9)  # the loop's clock does not tell shorter times apart
        await hub.close()

    virtual_time.run(scenario)


def test_the_end_of_a_stream_travels_too_and_comes_last():
    async def scenario(swarm):
        stream = await swarm.client.open_stream("echo")
        await stream.send(HELLO, b"last")
        stream.close()
        with pytest.raises(PeerLost):
            await stream.receive()  # its own end is closed at once
        await asyncio.sleep(0.19)
        assert (swarm.heard, swarm.ends) == ([], [])
        await asyncio.sleep(0.02)
        assert (swarm.heard, swarm.ends) == ([b"last"], ["lost"])

    run(scenario, delay=there_and_back)


def test_a_killed_peers_streams_end_at_once_for_the_others():
    async def scenario(swarm):
        stream = await swarm.client.open_stream("echo")
        await stream.send(HELLO, b"never heard")
        began = now()
        swarm.hub.kill("echo")
        with pytest.raises(PeerLost):
            await stream.receive()
        with pytest.raises(PeerLost):
            await stream.send(HELLO)
        assert now() == began
        with pytest.raises(PeerLost, match="cannot be reached"):
            await swarm.client.open_stream("echo")
        assert (swarm.heard, swarm.ends) == ([], ["killed"])

    run(scenario, delay=there_and_back)


def test_nothing_passes_to_or_from_a_peer_that_hangs_and_everything_once_it_goes_on():
    async def scenario(swarm):
        before = await swarm.client.open_stream("echo")
        await before.send(HELLO, b"one")
        await asyncio.sleep(0.25)  # heard; the echo is on its way
        swarm.hub.hang("echo")
        await before.send(HELLO, b"two")
        opening = asyncio.create_task(swarm.client.open_stream("echo"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await before.receive()
        assert swarm.heard == [b"one"]
        assert not opening.done()
        began = now()
        swarm.hub.resume("echo")
        assert [bytes((await before.receive()).payload) for _ in range(2)] == [b"one", b"two"]
        assert now() - began == pytest.approx(0.3)  # "two" had arrived; its echo travels
        await opening

    run(scenario, delay=there_and_back)


def test_a_peer_that_hangs_takes_only_so_much():
    async def scenario(swarm):
        stream = await swarm.client.open_stream("echo")
        swarm.hub.hang("echo")
        await stream.send(HELLO, bytes(MAX_UNREAD_BYTES // 2))
        sending = asyncio.create_task(stream.send(HELLO, bytes(MAX_UNREAD_BYTES)))
        await asyncio.sleep(100)
        assert not sending.done()
        swarm.hub.resume("echo")
        await sending
        for length in (MAX_UNREAD_BYTES // 2, MAX_UNREAD_BYTES):
            assert len((await stream.receive()).payload) == length

    run(scenario)


def test_single_messages_can_be_lost():
    asked = []

    def drops(source, target, message):
        asked.append((source, target, type(message)))
        return len(asked) == 1

    async def scenario(swarm):
        stream = await swarm.client.open_stream("echo")
        await stream.send(HELLO, b"lost")
        await stream.send(HELLO, b"heard")
        assert (await stream.receive()).payload == b"heard"
        assert swarm.heard == [b"heard"]
        assert asked == [("client", "echo", messages.InfoRequest)] * 2 + [("echo", "client", messages.InfoRequest)]

    run(scenario, drops=drops)
