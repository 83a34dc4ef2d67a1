"""Holders that want a receiver to break down, to wait without end, or to believe them."""

from __future__ import annotations

import time

import msgspec
import pytest

from swarm.errors import WeightsUnavailable
from swarm.protocol import messages
from swarm.shared_weights import checkpoint_parts, fetcher, manifest
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder_choice import STALLED_S
from swarm.shared_weights.manifest import MAX_ITEMS, all_parts
from swarm.shared_weights.part_store import PartStore
from tests import virtual_time
from tests.shared_weights import bad_holders as bad
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint, network

PARTS = all_parts(BLOCKS)
DIGEST = bytes(32)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Tensors of some kilobytes, in many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "CHUNK_BYTES", 256)
        patch.setattr(checkpoint_parts, "CHUNK_BYTES", 256)
        found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("model") / "model"))
        found.manifests()
        yield found


def receive(parts: CheckpointParts, folder, holders: dict, wanted=PARTS, limit_s: float = 600.0) -> set[str]:
    """Receive from such handlers, by name; the liars that were found. Raises as `fetch_parts`."""
    digests = parts.manifests().digests
    store = PartStore.open(folder, NAME, parts.checkpoint.revision, BLOCKS, digests)
    liars: set[str] = set()
    raised: list[BaseException] = []

    async def scenario() -> None:
        async with network() as swarm:
            for name, handler in holders.items():
                await swarm.add(name, handler)
            try:
                await swarm.fetch(store, wanted, liars=liars)
            except WeightsUnavailable as error:
                raised.append(error)

    virtual_time.run(scenario, limit=limit_s)
    if raised:
        raise raised[0]
    return liars


def finding(found: messages.Message):
    """The handler of a peer that answers the first request so, and then nothing."""

    async def serve(stream):
        await stream.receive(0)
        await stream.send(found)
        await stream.discard_incoming()

    return serve


def found(parts: CheckpointParts, revision: str = "", blocks: int = BLOCKS, **digests: bytes) -> messages.PartsFound:
    return messages.PartsFound(revision or parts.checkpoint.revision, blocks, digests)


def test_a_peer_that_answers_for_another_revision_or_for_parts_that_cannot_be_is_a_liar(parts, tmp_path):
    lies = {
        "revision": found(parts, revision="other"),
        "part": messages.PartsFound(parts.checkpoint.revision, BLOCKS, {str(BLOCKS): DIGEST}),
        "parts": messages.PartsFound(parts.checkpoint.revision, 2048, {str(one): DIGEST for one in range(2000)}),
        "message": messages.PartData(),
    }
    holders = {name: finding(lie) for name, lie in lies.items()}
    liars = receive(parts, tmp_path, {**holders, "honest": bad.holder(parts, bad.honest)})
    assert liars == {"revision", "part", "message"}, "other digests are no lie: none of its parts is believed"


def test_digests_of_other_parts_are_not_asked_for(parts, tmp_path):
    """What is trusted decides, so that no manifest is even looked at."""
    digests = {part: bytes.fromhex(digest) for part, digest in parts.manifests().digests.items()}
    swapped = dict(zip(digests, reversed(digests.values()), strict=True))
    del swapped["0"]  # the one in the middle
    holder = finding(messages.PartsFound(parts.checkpoint.revision, BLOCKS, swapped))
    with pytest.raises(WeightsUnavailable, match="shares none of the parts"):
        receive(parts, tmp_path, {"holder": holder})


def test_a_manifest_of_as_many_items_as_there_may_be_is_refused_quickly(parts, tmp_path):
    items = [[f"{number}", "U8", [1], 1, DIGEST] for number in range(MAX_ITEMS)]
    huge = msgspec.msgpack.encode(items)
    liar = bad.holder(parts, bad.wrong_in(messages.GetManifest, lambda right: huge))
    began = time.process_time()
    assert receive(parts, tmp_path, {"liar": liar, "honest": bad.holder(parts, bad.honest)}) == {"liar"}
    assert time.process_time() - began < 5.0


def test_wrong_digests_of_the_next_part_end_the_stream_though_chunks_are_waited_for(parts, tmp_path):
    """At 257aae6 the chunks that were asked for behind them were waited for without end, and the liar was not found."""

    async def lie(stream, request, right):
        is_lie = isinstance(request, messages.GetChunkDigests) and request.part == "1"
        await stream.send(messages.PartData(), bad.flipped(right) if is_lie else right)

    holders = {"liar": bad.holder(parts, lie)}
    with pytest.raises(WeightsUnavailable, match="wrong digests"):
        receive(parts, tmp_path, holders, ("0", "1", "2"), limit_s=5.0)


@pytest.mark.parametrize("answer", [bad.silent, bad.dripping], ids=["silent", "dripping"])
def test_chunks_of_a_peer_that_sends_nothing_are_asked_for_elsewhere(parts, tmp_path, answer):
    """At 257aae6 the last ones were waited for as long as a chunk may take over the slowest link."""

    async def some(stream, request, right):
        if isinstance(request, messages.GetChunk):
            await answer(stream, request, right)
        await stream.send(messages.PartData(), right)

    began = []

    async def honest(stream):
        began.append(time.monotonic())
        await bad.holder(parts, bad.honest)(stream)

    assert not receive(
        parts, tmp_path, {"bad": bad.holder(parts, some), "honest": honest}, limit_s=STALLED_S + 2 * fetcher.RETRY_S + 1
    )


def test_silent_peers_do_not_keep_the_room_of_others(parts, tmp_path):
    holders = {f"silent {number}": bad.holder(parts, bad.silent) for number in range(fetcher.MAX_HOLDERS)}
    honest = {"honest": bad.holder(parts, bad.honest)}
    assert not receive(parts, tmp_path, {**holders, **honest}, limit_s=STALLED_S + 2 * fetcher.RETRY_S + 1)
