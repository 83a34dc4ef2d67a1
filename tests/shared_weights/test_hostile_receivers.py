"""Receivers that want a holder to break down: streams without end, requests for everything, answers never read."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from swarm.errors import PeerLost, TooManyDownloads
from swarm.protocol import messages
from swarm.shared_weights import holder as holder_module
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import IDLE_TIMEOUT_S, MAX_PEER_STREAMS, MAX_STREAMS, WeightsHolder
from swarm.shared_weights.holder_stream import HolderStream
from swarm.shared_weights.manifest import CHUNK_BYTES
from tests import virtual_time
from tests.memory_hub import MemoryHub
from tests.shared_weights.peers import NAME, make_checkpoint, run
from tests.shared_weights.processes import open_stream, serving

REQUESTS = 500
LARGE = (1, 2)
"""Items of three chunks, of a block whose tensors have some megabytes."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Tensors of up to three chunks."""
    found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("large") / "model", hidden=600))
    found.manifests(("0",))
    return found


@pytest.fixture
def socket():
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sw-") as folder:  # short: names of sockets are
        yield f"{folder}/socket"


def in_memory(scenario) -> None:
    """Run a scenario with a network in memory, on virtual time."""

    async def whole() -> None:
        hub = MemoryHub()
        try:
            await scenario(hub)
        finally:
            await hub.close()

    virtual_time.run(whole)


async def ask(hub: MemoryHub, peer: str) -> HolderStream:
    """A stream of a peer that has been told what there is. Raises `RemoteError`."""
    stream = HolderStream(await hub.connect(peer, "holder"))
    await stream.find(NAME, "")
    return stream


def test_a_peer_has_two_streams_and_all_have_sixteen(parts):
    async def scenario(hub):
        await hub.serve("holder", WeightsHolder(parts).serve)
        streams = [await ask(hub, f"peer {number // MAX_PEER_STREAMS}") for number in range(MAX_PEER_STREAMS)]
        with pytest.raises(TooManyDownloads):
            await ask(hub, "peer 0")
        while len(streams) < MAX_STREAMS:
            streams.append(await ask(hub, f"peer {len(streams) // MAX_PEER_STREAMS}"))
        with pytest.raises(TooManyDownloads, match="16 downloads"):
            await ask(hub, "another peer")
        streams[0].close()
        await asyncio.sleep(0.1)
        await ask(hub, "another peer")

    in_memory(scenario)


def test_streams_that_ask_for_nothing_give_their_room_back(parts):
    """Also those that say nothing at all, and those that stop in the middle of a request."""

    async def scenario(hub):
        await hub.serve("holder", WeightsHolder(parts).serve)
        for number in range(MAX_STREAMS // 2):
            await ask(hub, f"peer {number}")
            stalled = await hub.connect(f"peer {number}", "holder")
            stalled._writer.write(b"\0\0" if number % 2 else b"")
        with pytest.raises(TooManyDownloads):
            await ask(hub, "another peer")
        await asyncio.sleep(IDLE_TIMEOUT_S + 1)
        await ask(hub, "another peer")

    in_memory(scenario)


def test_a_request_that_drips_is_not_waited_for_longer(parts):
    async def scenario(hub):
        await hub.serve("holder", WeightsHolder(parts).serve)
        stream = await hub.connect("peer", "holder")
        with suppress(ConnectionResetError):  # the stream has ended
            for _ in range(100):
                stream._writer.write(b"\0")
                await asyncio.sleep(10)
        with pytest.raises(PeerLost):
            await stream.receive(0)
        await asyncio.sleep(0.1)
        assert not hub.tasks

    in_memory(scenario)


class Reads:
    """Counts the chunks that a holder has read from its files."""

    def __init__(self, parts: CheckpointParts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = parts.read

        def read(part: str, item: int, chunk: int) -> bytes:
            self.count += 1
            return real(part, item, chunk)

        monkeypatch.setattr(parts, "read", read)


def test_whoever_asks_for_everything_and_reads_nothing_takes_a_chunk_of_memory_and_is_given_up(
    large, socket, monkeypatch
):
    """At 257aae6 it kept its room for ever: sixteen such streams, and the holder gave nothing to anybody."""
    monkeypatch.setattr(holder_module, "SEND_TIMEOUT_S", 0.5)
    reads = Reads(large, monkeypatch)

    async def scenario():
        holder = WeightsHolder(large)
        async with serving(socket, holder.serve) as tasks:
            streams = [await open_stream(socket) for _ in range(MAX_PEER_STREAMS)]
            for stream in streams:
                await stream.send(messages.FindParts(NAME, ""))
                for _ in range(REQUESTS):
                    await stream.send(messages.GetChunk("0", LARGE[0], 0))
            while reads.count < MAX_PEER_STREAMS:
                await asyncio.sleep(0.01)
            while tasks:
                await asyncio.wait(tuple(tasks))
            assert not holder._streams
            for stream in streams:
                stream.abort()

    run(scenario())
    # What fits into buffers of the system, and one that waits.
    assert MAX_PEER_STREAMS <= reads.count <= MAX_PEER_STREAMS * 4


@pytest.mark.parametrize("change", ["removed", "changed", "shortened"])
def test_a_holder_whose_files_are_no_longer_what_they_were_says_so_and_sends_nothing_wrong(tmp_path, change):
    one = make_checkpoint(tmp_path / "model")
    parts = CheckpointParts(one)
    parts.manifests()
    path = Path(one.source) / "model.safetensors"
    answers = []

    async def scenario(hub):
        await hub.serve("holder", WeightsHolder(parts).serve)
        stream = await hub.connect("peer", "holder")
        await stream.send(messages.FindParts(NAME, ""))
        await stream.receive(0)
        data = path.read_bytes()
        if change == "removed":
            path.unlink()
        else:
            path.write_bytes(data[:-1] + b"\1" if change == "changed" else data[: len(data) // 2])
        await stream.send(messages.GetChunk("2", 0, 0))
        answers.append(messages.decode_weights((await stream.receive(CHUNK_BYTES)).header))

    in_memory(scenario)
    (answer,) = answers
    assert isinstance(answer, messages.Refusal)
    assert answer.code == "server_fault"
    assert str(tmp_path) not in answer.message, "paths of a machine are not told to others"
