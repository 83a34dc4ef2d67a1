from __future__ import annotations

import asyncio

import pytest

from swarm.errors import MemoryFull, PeerLost, PeerTimeout
from swarm.protocol.framing import encode_prefix
from swarm.protocol.messages import ProbeReply, ProbeRequest, decode_client, decode_server, encode
from swarm.server.sessions.push_link import PUSH_TIMEOUT_S
from swarm.server.sessions.reply_stream import DISCARD_TIMEOUT_S, ReplyStream
from tests import memory_hub, virtual_time
from tests.async_tests import as_test
from tests.memory_hub import MemoryHub, stream_pair

PAUSE = 0.5


def on_virtual_time(scenario, hub: MemoryHub | None = None) -> None:
    async def whole() -> None:
        ours, theirs = stream_pair("server", "client", hub)
        await scenario(ReplyStream(ours), theirs)

    virtual_time.run(whole)


stream_test = as_test(on_virtual_time, "stream", "peer")


async def number(stream) -> int:
    return decode_client((await stream.receive()).header).reply_bytes


@stream_test()
async def test_frames_keep_their_order(stream, peer):
    await stream.send_later(PAUSE, ProbeRequest(1))
    await stream.send(ProbeRequest(2))
    await stream.send_later(PAUSE, ProbeRequest(3))
    await stream.send_later(0.0, ProbeRequest(4))
    assert [await number(peer) for _ in range(4)] == [1, 2, 3, 4]


@stream_test()
async def test_a_frame_that_was_to_leave_later_does_not_outlive_its_stream(stream, peer):
    await stream.send_later(PAUSE, ProbeRequest(1))
    stream.close()
    with pytest.raises(PeerLost):
        await peer.receive()
    await asyncio.sleep(2 * PAUSE)
    with pytest.raises(PeerTimeout):
        await stream.send(ProbeRequest(2))


def test_a_peer_that_does_not_read_a_later_frame_is_given_up_in_the_same_time(monkeypatch):
    monkeypatch.setattr(memory_hub, "MAX_UNREAD_BYTES", 0)

    hub = MemoryHub()

    async def scenario(stream, peer):
        loop = asyncio.get_running_loop()
        hub.hang("client")
        await stream.send_later(PAUSE, ProbeReply(), b"x")
        began = loop.time()
        with pytest.raises(PeerTimeout):
            await stream.send(ProbeRequest(2))
        assert loop.time() - began == pytest.approx(PAUSE + PUSH_TIMEOUT_S, rel=0.01)

    on_virtual_time(scenario, hub)


@stream_test()
async def test_who_never_hangs_up_is_not_waited_for_long(stream, peer):
    began = asyncio.get_running_loop().time()
    await stream.discard_incoming()
    assert asyncio.get_running_loop().time() == pytest.approx(began + DISCARD_TIMEOUT_S)


@stream_test()
async def test_who_is_interrupted_while_a_frame_comes_can_still_be_answered(stream, peer):
    stream._task = asyncio.current_task()  # as in the task that serves it
    admitted = asyncio.Event()

    async def admit(header, length):
        admitted.set()

    async def interrupt():
        await admitted.wait()
        stream.interrupt(MemoryFull("too slow"))
        stream.interrupt(MemoryFull("too late"))

    async def read():
        heard.append(decode_server((await peer.receive()).header))
        with pytest.raises(PeerLost):
            await peer.receive()

    header, heard = encode(ProbeRequest(1)), []
    peer._writer.write(encode_prefix(len(header), 1000) + header + bytes(10))
    interrupting, reading = asyncio.create_task(interrupt()), asyncio.create_task(read())
    with pytest.raises(MemoryFull, match="too slow"):
        await stream.receive(2000, admit)
    assert not asyncio.current_task().cancelling()
    stream.interrupt(MemoryFull("nothing comes now"))
    await stream.send(ProbeReply())
    await stream.discard_incoming(1.0)
    stream.close()
    await asyncio.gather(interrupting, reading)
    assert heard == [ProbeReply()]


@stream_test()
async def test_a_task_that_is_canceled_as_well_ends(stream, peer):
    async def serve():
        stream._task = asyncio.current_task()
        await stream.receive()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    stream.interrupt(MemoryFull("too slow"))
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
