from __future__ import annotations

import asyncio

import pytest

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.transport.memory import MemoryHub, MemoryNetwork, stream_pair


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


def test_every_stream_has_a_handler_of_its_own():
    async def scenario():
        hub = MemoryHub()

        async def handler(stream):
            while True:
                frame = await stream.receive()
                await stream.send(messages.InfoRequest(), frame.payload)

        await MemoryNetwork(hub, "server").serve(handler)
        one = await MemoryNetwork(hub, "a").open_stream("server")
        two = await MemoryNetwork(hub, "b").open_stream("server")
        await two.send(messages.InfoRequest(), b"two")
        assert (await two.receive()).payload == b"two"
        await one.send(messages.InfoRequest(), b"one")
        assert (await one.receive()).payload == b"one"
        for task in hub.tasks:
            task.cancel()

    asyncio.run(scenario())


def test_a_peer_that_does_not_serve_cannot_be_reached():
    async def scenario():
        with pytest.raises(PeerLost, match="…nobody cannot be reached"):
            await MemoryNetwork(MemoryHub(), "client").open_stream("nobody")

    asyncio.run(scenario())


def test_a_closed_end_cannot_send_and_can_be_closed_again():
    async def scenario():
        ours, _ = stream_pair("us", "them")
        ours.close()
        ours.close()
        with pytest.raises(PeerLost):
            await ours.send(messages.InfoRequest())

    asyncio.run(scenario())


def test_finished_handlers_are_forgotten():
    async def scenario():
        hub = MemoryHub()
        done = asyncio.Event()

        async def handler(stream):
            done.set()

        await MemoryNetwork(hub, "server").serve(handler)
        await MemoryNetwork(hub, "client").open_stream("server")
        (task,) = hub.tasks
        await task
        assert done.is_set()
        await asyncio.sleep(0)  # the callback that forgets it
        assert not hub.tasks

    asyncio.run(scenario())
