"""Parts of a model, from peers in memory into a store on disk."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from swarm.errors import (
    PeerLost,
    ProtocolViolation,
    ServerFault,
    TooManyDownloads,
    WeightsNotShared,
    WeightsUnavailable,
)
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights import fetcher
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import RETRY_S, STALLED_S, WINDOW, HolderChoice
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import CLIENT, FILES, all_parts
from swarm.shared_weights.part_store import PartStore
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint, network, run

PARTS = all_parts(BLOCKS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Tensors of up to three chunks."""
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", hidden=600)


def store_for(checkpoint, root) -> PartStore:
    manifest = CheckpointParts(checkpoint).manifests()
    return PartStore.open(root, NAME, checkpoint.revision, BLOCKS, manifest.digests)


def assert_same(checkpoint, store: PartStore, parts=PARTS) -> None:
    """What was received is what there was."""
    source = load_file(f"{checkpoint.source}/model.safetensors")
    found = {name: tensor for part in parts if part != FILES for name, tensor in load_file(store.path(part)).items()}
    assert found.keys() == {
        name for name in source if (str(place[0]) if (place := checkpoint.locate(name)) else CLIENT) in parts
    }
    for name, tensor in found.items():
        assert torch.equal(tensor, source[name]), name


def test_what_was_received_is_a_checkpoint_of_the_same_name(checkpoint, tmp_path):
    store = store_for(checkpoint, tmp_path)

    async def scenario():
        async with network() as swarm:
            await swarm.add_holder("one", CheckpointParts(checkpoint))
            await swarm.fetch(store, PARTS)

    run(scenario())
    assert store.held == set(PARTS)
    assert_same(checkpoint, store)
    received = open_checkpoint(store.folder)
    assert (received.name, received.revision, received.blocks) == (NAME, checkpoint.revision, BLOCKS)
    assert received.block_digests(0, BLOCKS) == checkpoint.block_digests(0, BLOCKS)
    assert CheckpointParts(received).manifests() == CheckpointParts(checkpoint).manifests()


def test_large_tensors_come_from_several_peers(large, tmp_path):
    store = store_for(large, tmp_path)
    asked: dict[str, int] = {}

    async def scenario():
        async with network() as swarm:
            swarm.hub.delay = lambda source, target: 0.002
            holders = [await swarm.add_holder(name, CheckpointParts(large)) for name in ("one", "two", "three")]
            await swarm.fetch(store, PARTS)
            asked.update({str(number): holder.sent_bytes for number, holder in enumerate(holders)})

    run(scenario())
    assert_same(large, store)
    assert all(asked.values()), "each has sent something"
    manifest = CheckpointParts(large).manifests()
    assert sum(asked.values()) == manifest.size_bytes(PARTS), "nothing was sent twice"


@pytest.mark.parametrize("after", [0, 7, 15])
def test_a_transfer_that_was_broken_off_goes_on(large, tmp_path, after):
    """Whatever had come is not sent again, and nothing half-written looks whole."""
    digests = CheckpointParts(large).manifests()
    sent = []

    async def broken_off():
        async with network() as swarm:
            holder = await swarm.add_holder("one", CheckpointParts(large))
            reached, count = asyncio.Event(), 0

            def note(progress):
                nonlocal count
                count += 1
                if count > after:
                    reached.set()

            fetching = asyncio.ensure_future(swarm.fetch(store_for(large, tmp_path), PARTS, note))
            await reached.wait()
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            sent.append(holder.sent_bytes)

    run(broken_off())
    store = store_for(large, tmp_path)
    for part in store.held - {FILES}:
        assert_same(large, store, (part,))

    async def goes_on():
        async with network() as swarm:
            holder = await swarm.add_holder("one", CheckpointParts(large))
            await swarm.fetch(store, PARTS)
            sent.append(holder.sent_bytes)

    run(goes_on())
    assert_same(large, store)
    # At most what was under way when it was broken off comes a second time.
    assert sum(sent) <= digests.size_bytes(PARTS) + (WINDOW + 1) * (1 << 20)


def test_a_peer_that_sends_wrong_bytes_is_found_and_others_are_asked(large, tmp_path):
    store, liars = store_for(large, tmp_path), set()

    class Liar(CheckpointParts):
        def read(self, part, item, chunk):
            data = bytearray(super().read(part, item, chunk))
            data[-1] ^= 1
            return bytes(data)

    async def scenario():
        async with network() as swarm:
            await swarm.add_holder("liar", Liar(large))
            await swarm.add_holder("one", CheckpointParts(large))
            await swarm.fetch(store, PARTS, liars=liars)

    run(scenario())
    assert liars == {"liar"}
    assert_same(large, store)


def test_a_holder_that_still_reads_its_weights_is_waited_for(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(fetcher, "RETRY_S", 0.05)
    store, go_on = store_for(checkpoint, tmp_path), threading.Event()

    class Slow(CheckpointParts):
        def manifest(self, part, on_hashed=lambda size: None):
            go_on.wait()
            return super().manifest(part, on_hashed)

    async def scenario():
        async with network() as swarm:
            holder = WeightsHolder(Slow(checkpoint))
            preparing = asyncio.ensure_future(holder.prepare())
            refused = asyncio.Event()

            async def serve(stream):
                if go_on.is_set():
                    await preparing
                try:
                    await holder.serve(stream)
                finally:
                    refused.set()

            await swarm.add("one", serve)
            fetching = asyncio.ensure_future(swarm.fetch(store, PARTS))
            await refused.wait()
            go_on.set()
            await fetching

    run(scenario())
    assert_same(checkpoint, store)


def test_without_holders_it_says_so_at_once(checkpoint, tmp_path):
    store = store_for(checkpoint, tmp_path)

    async def scenario():
        async with network() as swarm:
            with pytest.raises(WeightsUnavailable, match="no peer is known"):
                await asyncio.wait_for(swarm.fetch(store, PARTS), 5)

    run(scenario())


def test_nothing_is_taken_that_no_digest_vouches_for(checkpoint, tmp_path):
    store = PartStore.open(tmp_path, NAME, checkpoint.revision, BLOCKS, {})

    async def scenario():
        async with network() as swarm:
            await swarm.add_holder("one", CheckpointParts(checkpoint))
            with pytest.raises(WeightsUnavailable, match="nothing says what part files"):
                await swarm.fetch(store, PARTS)

    run(scenario())


def test_files_that_name_code_are_refused_although_their_digest_is_right(tmp_path):
    one = make_checkpoint(tmp_path / "model")
    store = store_for(one, tmp_path)

    class Offers(CheckpointParts):
        @property
        def _files(self):
            return {"config.json": b'{"auto_map": {"AutoConfig": "evil.Config"}}'}

    malicious = Offers(one)
    store.digests[FILES] = malicious.manifest(FILES).digest

    async def scenario():
        async with network() as swarm:
            await swarm.add_holder("one", malicious)
            with pytest.raises(WeightsUnavailable, match=r"config\.json.*auto_map.*code does not travel"):
                await swarm.fetch(store, (FILES,))

    run(scenario())
    assert FILES not in store.held
    assert not (store.folder / "config.json").exists()


def test_the_next_part_is_begun_while_chunks_are_under_way(large, tmp_path):
    """No round trip is waited for between parts."""
    store = store_for(large, tmp_path)
    asked: list[str] = []

    class Noting(CheckpointParts):
        def manifest(self, part, *arguments):
            asked.append(part)
            return super().manifest(part, *arguments)

        def read(self, part, item, chunk):
            asked.append(f"chunk of {part}")
            return super().read(part, item, chunk)

    async def scenario():
        async with network() as swarm:
            swarm.hub.delay = lambda source, target: 0.01
            await swarm.add_holder("one", Noting(large))
            asked.clear()
            await swarm.fetch(store, ("0", "1"))

    run(scenario())
    last = len(asked) - 1 - asked[::-1].index("chunk of 0")
    assert asked.index("1") < last


errors = st.sampled_from([PeerLost, ProtocolViolation, ServerFault, TooManyDownloads, WeightsNotShared])


def choice(*holders: str, liars: set[str] | None = None) -> HolderChoice:
    found = HolderChoice(set() if liars is None else liars)
    found.find(holders)
    return found


def test_those_that_failed_are_asked_again_after_a_while():
    chosen = choice("lost", "full", "stalled", "done")
    chosen.note_error("lost", PeerLost("gone"), 0)
    chosen.note_error("full", TooManyDownloads("full"), 0)
    chosen.note_error("stalled", PeerLost("gone"), 0, is_stalled=True)
    chosen.note_end("done")
    assert chosen.to_ask(RETRY_S - 0.1) == []
    assert chosen.to_ask(RETRY_S) == ["lost"]
    assert chosen.to_ask(2 * RETRY_S) == ["lost", "full"]
    assert chosen.to_ask(STALLED_S) == ["lost", "full", "stalled"]


def test_a_silent_peer_is_given_up_only_for_others():
    late = STALLED_S + 1
    assert not choice("a").stalled({"a": late}), "it is the only one"
    assert not choice("a", "b").stalled({"a": late - 2, "b": 0.0})
    assert choice("a", "b").stalled({"a": late}) == ["a"], "b has not been asked yet"
    assert choice("a", "b").stalled({"a": late, "b": 0.0}) == ["a"]
    assert not choice("a", "b").stalled({"a": late, "b": late})
    tried = choice("a", "b")
    tried.note_error("b", PeerLost("gone"), 0)
    assert not tried.stalled({"a": late}), "b may be gone for good, and a may be slow"
