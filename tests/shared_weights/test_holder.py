from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import CheckpointError, RemoteError, WeightsNotReady
from swarm.protocol import messages
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import BUSY_BYTES_PER_S, UploadPace, WeightsHolder
from swarm.shared_weights.holder_stream import HolderStream
from swarm.shared_weights.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, all_parts
from tests import virtual_time
from tests.memory_hub import MemoryHub
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint

MAX_ANSWER_BYTES = MAX_MANIFEST_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def parts(checkpoint):
    return CheckpointParts(checkpoint)


def said_by(holder: WeightsHolder, *requests: messages.Message) -> list[messages.WeightsMessage]:
    """What a holder answers to these, until it ends the stream or all are answered."""
    answers: list[messages.WeightsMessage] = []

    async def scenario() -> None:
        hub = MemoryHub()
        await hub.serve("holder", holder.serve)
        stream = await hub.connect("peer", "holder")
        for request in requests:
            await stream.send(request)
        try:
            while len(answers) < len(requests):
                answers.append(messages.decode_weights((await stream.receive(MAX_ANSWER_BYTES)).header))
        except RemoteError:
            pass
        finally:
            stream.close()
            await hub.close()

    virtual_time.run(scenario)
    return answers


def prepared(parts: CheckpointParts) -> WeightsHolder:
    parts.manifests()
    return WeightsHolder(parts)


FIND = messages.FindParts(NAME, "")


def test_it_says_what_it_has(parts, checkpoint):
    digests = {part: bytes.fromhex(one) for part, one in parts.manifests().digests.items()}
    found = messages.PartsFound(checkpoint.revision, BLOCKS, digests)
    assert set(digests) == set(all_parts(BLOCKS))
    assert said_by(prepared(parts), FIND) == [found]
    assert said_by(prepared(parts), messages.FindParts(NAME, checkpoint.revision)) == [found]


def test_other_models_and_revisions_are_not_shared(parts):
    for first in [messages.FindParts("other", ""), messages.FindParts(NAME, "other")]:
        (answer,) = said_by(prepared(parts), first, messages.GetManifest("0"))
        assert answer.code == "weights_not_shared"


def test_what_is_refused_ends_the_stream(parts):
    for request_, code in [
        (messages.GetManifest(str(BLOCKS)), "weights_not_shared"),
        (messages.GetChunk("9999", 0, 0), "weights_not_shared"),
        (messages.GetChunkDigests("9999"), "weights_not_shared"),
        (messages.GetChunk("0", 9, 0), "request_refused"),
        (messages.GetChunk("0", 2**31 - 1, 0), "request_refused"),
        (messages.GetChunk("0", 0, 1), "request_refused"),
        (messages.GetChunk("0", 0, 2**31 - 1), "request_refused"),
        (messages.FindParts(NAME, ""), "protocol_violation"),
        (messages.PartsFound("main", 1, {}), "protocol_violation"),
        (messages.PartData(), "protocol_violation"),
        (messages.InfoRequest(), "protocol_violation"),
    ]:
        answers = said_by(prepared(parts), FIND, messages.GetManifest("0"), request_, messages.GetManifest("0"))
        assert [type(one) for one in answers] == [messages.PartsFound, messages.PartData, messages.Refusal]
        assert answers[-1].code == code


def test_before_it_has_looked_it_asks_for_patience(parts):
    """At 4e50066 a server that was still loading was taken for one that shares nothing."""
    (answer,) = said_by(WeightsHolder(parts), FIND)
    assert answer.code == WeightsNotReady.code


def test_a_part_that_cannot_be_read_is_not_offered_and_others_are(parts, monkeypatch):
    real = parts.manifest

    def manifest(part: str, *arguments: object):
        if part == "1":
            raise CheckpointError("the drive has failed")
        return real(part, *arguments)

    monkeypatch.setattr(parts, "manifest", manifest)
    holder = WeightsHolder(parts)
    asyncio.run(holder.prepare())
    (found,) = said_by(holder, FIND)
    assert set(found.digests) == set(all_parts(BLOCKS)) - {"1"}


def test_what_cannot_be_looked_at_is_not_waited_for(checkpoint):
    class Broken(CheckpointParts):
        @property
        def held(self):
            raise CheckpointError("there is no index")

    holder = WeightsHolder(Broken(checkpoint))
    with pytest.raises(CheckpointError):
        asyncio.run(holder.prepare())
    (found,) = said_by(holder, FIND)
    assert found.digests == {}


def test_parts_that_came_later_are_shared_on_new_streams(parts, checkpoint):
    async def scenario() -> None:
        hub = MemoryHub()
        holder = WeightsHolder(parts)
        await holder.prepare()
        await hub.serve("holder", holder.serve)
        old = HolderStream(await hub.connect("peer", "holder"))
        await old.find(NAME, "")
        holder.parts = CheckpointParts(checkpoint)
        holder.parts.manifest("0")
        assert await old.manifest("2") == parts.manifest("2").encoded
        new = HolderStream(await hub.connect("peer", "holder"))
        assert set((await new.find(NAME, "")).digests) == {"0"}
        await hub.close()

    virtual_time.run(scenario)


sizes = st.lists(st.integers(0, 4 * CHUNK_BYTES), min_size=1, max_size=20)
rates = st.none() | st.floats(1e3, 1e9)


def seconds(sizes: list[int], bytes_per_s: float | None, is_busy: bool, at_once: bool = False) -> list[float]:
    """When each of these may be sent, one after the other or all asked for at once."""
    ends: list[float] = []

    async def scenario() -> None:
        pace = UploadPace(time.monotonic, bytes_per_s, lambda: is_busy)

        async def send(size: int) -> None:
            await pace.wait(size)
            ends.append(time.monotonic())

        if at_once:
            await asyncio.gather(*map(send, sizes))
        else:
            for size in sizes:
                await send(size)

    virtual_time.run(scenario, limit=1e9)
    return ends


@given(sizes, rates, st.booleans(), st.booleans())
def test_no_more_is_sent_than_the_bounds_allow_and_no_less(sizes, rate, is_busy, at_once):
    """A chunk is free, and then all together are sent at the rate of whichever bound is lower."""
    bounds = [one for one in (rate, BUSY_BYTES_PER_S if is_busy else None) if one is not None]
    ends = sorted(seconds(sizes, rate, is_busy, at_once))
    if bounds:
        expected = max(0.0, sum(sizes) - CHUNK_BYTES) / min(bounds)
        assert ends[-1] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert ends[-1] == 0.0


def test_clients_that_come_slow_it_down_and_those_that_leave_do_not():
    busy, ends = False, []

    async def scenario() -> None:
        nonlocal busy
        pace = UploadPace(time.monotonic, None, lambda: busy)
        for are_there in (False, True, False):
            busy = are_there
            began = time.monotonic()
            for _ in range(9):
                await pace.wait(CHUNK_BYTES)
            ends.append(time.monotonic() - began)

    virtual_time.run(scenario)
    assert ends == [0.0, pytest.approx(8 * CHUNK_BYTES / BUSY_BYTES_PER_S), 0.0]
