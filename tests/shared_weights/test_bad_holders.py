"""Whatever peers share a model, honest ones or not: its right parts come, or an error says why they do not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.errors import (
    ProtocolViolation,
    RequestRefused,
    ServerFault,
    TooManyDownloads,
    WeightsNotReady,
    WeightsNotShared,
    WeightsUnavailable,
)
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.shared_weights import checkpoint_parts, fetcher, manifest
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import STALLED_S
from swarm.shared_weights.manifest import all_parts
from swarm.shared_weights.part_store import PartStore
from tests import virtual_time
from tests.shared_weights import bad_holders as bad
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint, network

PARTS = all_parts(BLOCKS)
DIGEST = bytes(32)
CHUNK_BYTES = 700
"""So that tensors of a few kilobytes have several chunks, and the last one is shorter."""

MAX_S = 600.0
"""Virtual seconds that receiving may take, whatever peers do: some of them fall silent one after the other."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(checkpoint_parts, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr("os.fsync", lambda descriptor: None)  # no power fails here
        found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("model") / "model"))
        found.manifests()
        yield found


@dataclass(frozen=True)
class Bad:
    """A peer that is not honest, by the name of what it does."""

    name: str
    answer: Callable[[], bad.Answer]

    def __repr__(self) -> str:
        return self.name


CHUNK, DIGESTS, MANIFEST = messages.GetChunk, messages.GetChunkDigests, messages.GetManifest
SILENT = Bad("silent", lambda: bad.silent)
BAD = [
    Bad("wrong chunks", lambda: bad.wrong_in(CHUNK, bad.flipped)),
    Bad("wrong digests", lambda: bad.wrong_in(DIGESTS, bad.flipped)),
    Bad("wrong manifests", lambda: bad.wrong_in(MANIFEST, bad.flipped)),
    Bad("too much", lambda: bad.wrong_in(CHUNK, lambda data: data + b"\0")),
    Bad("too little", lambda: bad.wrong_in(CHUNK, lambda data: data[:-1])),
    Bad("nothing as a chunk", lambda: bad.wrong_in(CHUNK, lambda data: b"")),
    Bad("too many digests", lambda: bad.wrong_in(DIGESTS, lambda data: data * 2)),
    Bad("a huge manifest", lambda: bad.wrong_in(MANIFEST, lambda data: bytes(manifest.MAX_MANIFEST_BYTES))),
    Bad("a manifest beyond any", lambda: bad.wrong_in(MANIFEST, lambda data: bytes(manifest.MAX_MANIFEST_BYTES + 1))),
    Bad("out of order", bad.out_of_order),
    Bad("not shared", lambda: bad.refusing(WeightsNotShared("no"))),
    Bad("not shared after a while", lambda: bad.refusing(WeightsNotShared("no"), 5)),
    Bad("a fault", lambda: bad.refusing(ServerFault("the drive has failed"))),
    Bad("a fault after a while", lambda: bad.refusing(ServerFault("the drive has failed"), 7)),
    Bad("busy", lambda: bad.refusing(TooManyDownloads("full"))),
    Bad("not ready", lambda: bad.refusing(WeightsNotReady("reading"))),
    Bad("refused", lambda: bad.refusing(RequestRefused("no such item"), 2)),
    Bad("accused", lambda: bad.refusing(ProtocolViolation("you lie"), 2)),
    Bad("dies at once", lambda: bad.dying(0)),
    Bad("dies", lambda: bad.dying(9)),
    Bad("hangs after a while", lambda: bad.ending(12, hangs=True)),
    Bad("closes after a while", lambda: bad.ending(12, hangs=False)),
    SILENT,
    Bad("drips", lambda: bad.dripping),
    Bad("noise", lambda: bad.noise),
    Bad("another message", lambda: bad.other_message(messages.FindParts("a", "b"))),
    Bad("a payload where none may be", lambda: bad.other_message(messages.PartsFound("a", 1, {}), b"x")),
]

subsets = st.lists(st.sampled_from(PARTS), unique=True).map(tuple)
peers = st.lists(st.sampled_from(BAD) | subsets, max_size=6)
"""Bad ones, and honest ones that have some of the parts."""


def check(parts: CheckpointParts, folder: Any, peers: list[Bad | tuple[str, ...]], wanted: tuple[str, ...]) -> bool:
    """Receive from these peers in virtual time; whether all came. What came is right."""
    one = parts.checkpoint
    digests = parts.manifests().digests
    store = PartStore.open(folder, NAME, one.revision, BLOCKS, digests)
    liars: set[str] = set()
    failures: list[WeightsUnavailable] = []

    async def scenario() -> None:
        async with network() as swarm:
            for number, peer in enumerate(peers):
                handler = (
                    bad.holder(parts, peer.answer())
                    if isinstance(peer, Bad)
                    else bad.holder(parts, bad.honest, offered=peer)
                )
                await swarm.add(f"peer {number}", handler)
            try:
                await swarm.fetch(store, wanted, liars=liars)
            except WeightsUnavailable as error:
                failures.append(error)

    virtual_time.run(scenario, limit=MAX_S)
    assert all(isinstance(peers[int(liar.split()[1])], Bad) for liar in liars), "an honest peer was blamed"
    assert bool(failures) != (store.held >= set(wanted))
    for part in store.held:
        assert received(store, part) == [parts.read(part, *where) for where in chunks_of(parts, part)], part
    if not failures and "files" in wanted:
        assert CheckpointParts(open_checkpoint(store.folder)).manifest("files") == parts.manifest("files")
    return not failures


def chunks_of(parts: CheckpointParts, part: str) -> list[tuple[int, int]]:
    items = parts.manifest(part).items
    return [(number, chunk) for number, item in enumerate(items) for chunk in range(item.chunks)]


def received(store: PartStore, part: str) -> list[bytes]:
    """The chunks of a part that is held."""
    found = CheckpointParts(open_checkpoint(store.folder)) if part == "files" else None
    if found is not None:
        return [found.read(part, *where) for where in chunks_of(found, part)]
    data, chunks, end = store.path(part).read_bytes(), [], 0
    begin = len(data) - store.manifests[part].size_bytes
    for item in store.manifests[part].items:
        for chunk in range(item.chunks):
            offset, length = item.chunk_range(chunk)
            chunks.append(data[begin + end + offset :][:length])
        end += item.size
    return chunks


@settings(max_examples=60)
@example([SILENT, SILENT, SILENT, ("files",)], ("files",))  # each in turn was waited for, until the time was over
@given(peers, st.lists(st.sampled_from(PARTS), unique=True, min_size=1).map(tuple))
def test_any_peers(parts, tmp_path_factory, peers, wanted):
    folder = tmp_path_factory.mktemp("store")
    done = check(parts, folder, peers, wanted)
    shutil.rmtree(folder)
    there = {part for peer in peers if not isinstance(peer, Bad) for part in peer}
    if there >= set(wanted):
        assert done, "honest peers had everything"


def test_a_peer_that_has_given_all_it_has_is_not_asked_over_and_over(parts, tmp_path):
    """While another one sends the rest, slowly."""
    asked = 0

    async def scenario() -> None:
        async with network() as swarm:
            first = bad.holder(parts, bad.honest, offered=("0",))

            async def counted(stream):
                nonlocal asked
                asked += 1
                await first(stream)

            await swarm.add("first", counted)
            await swarm.add("second", bad.holder(parts, bad.honest, offered=("1", "2")))
            swarm.hub.delay = lambda source, target: 0.5 if "second" in (source, target) else 0.0
            store = PartStore.open(tmp_path, NAME, parts.checkpoint.revision, BLOCKS, parts.manifests().digests)
            await swarm.fetch(store, ("0", "1", "2"))

    virtual_time.run(scenario)
    assert asked <= 2


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
    """Whether they say at first what they have, or nothing at all."""
    for name, silent in {"silent": bad.holder(parts, bad.silent), "mute": lambda one: one.discard_incoming()}.items():
        holders = {f"{name} {number}": silent for number in range(fetcher.MAX_HOLDERS)}
        holders["honest"] = bad.holder(parts, bad.honest)
        assert not receive(parts, tmp_path / name, holders, limit_s=STALLED_S + 2 * fetcher.RETRY_S + 1)
