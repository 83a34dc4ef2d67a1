"""Whatever holders do, parts arrive as they should be, or there is an error that says why; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from swarm.errors import WeightsNotShared, WeightsUnavailable
from swarm.protocol import messages
from swarm.shared_weights import manifest as manifests
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.manifest import CLIENT, FILES, all_parts
from swarm.shared_weights.part_store import PartStore
from tests import virtual_time
from tests.memory_hub import MemoryHub
from tests.shared_weights.peers import BLOCKS, NAME, Swarm, make_checkpoint

PARTS = all_parts(BLOCKS)
TENSOR_PARTS = tuple(part for part in PARTS if part != FILES)


@dataclass(frozen=True)
class Behavior:
    """What a holder does.

    Attributes:
        kind: "honest"; "lies" from answer `after` on; "dies", "hangs" or "hides" (closes streams) there, once or each
            time; "refuses"; "silent" from the start.
        parts: those that it offers.
    """

    kind: str
    after: int
    parts: frozenset[str]


behaviors = st.builds(
    Behavior,
    st.sampled_from(["honest", "lies", "dies", "hangs", "hides", "refuses", "silent"]),
    st.integers(0, 40),
    st.sets(st.sampled_from(PARTS), min_size=1).map(frozenset),
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model whose tensors have up to four chunks of 512 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "CHUNK_BYTES", 512)
        for module in ("checkpoint_parts", "upload_pace"):
            patch.setattr(f"swarm.shared_weights.{module}.CHUNK_BYTES", 512)
        found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("model") / "model", vocabulary=32))
        found.manifests()
        yield found


class Holder:
    """Serves the parts of a model as its behavior says."""

    def __init__(self, hub: MemoryHub, name: str, behavior: Behavior, parts: CheckpointParts) -> None:
        self.hub, self.name, self.behavior, self.parts = hub, name, behavior, parts
        self.answers = 0
        self.streams = 0

    async def serve(self, stream) -> None:
        self.streams += 1
        kind, parts = self.behavior.kind, self.parts
        await stream.receive(0)
        if kind == "silent":
            await asyncio.Event().wait()
        if kind == "refuses":
            await stream.send(messages.refusal(WeightsNotShared("this server does not share its weights")))
            return
        digests = {part: bytes.fromhex(parts.manifest(part).digest) for part in self.behavior.parts}
        await stream.send(messages.PartsFound(parts.checkpoint.revision, BLOCKS, digests))
        while True:
            request = messages.decode_weights((await stream.receive(0)).header)
            self.answers += 1
            is_due = self.answers > self.behavior.after
            if is_due and kind == "dies":
                self.hub.kill(self.name)
            if is_due and kind == "hangs":
                await asyncio.Event().wait()
            if is_due and kind == "hides":
                return
            data = self.answer(request)
            if is_due and kind == "lies":
                data = bytes([data[0] ^ 1]) + data[1:]
            await stream.send(messages.PartData(), data)

    def answer(self, request) -> bytes:
        if isinstance(request, messages.GetManifest):
            return self.parts.manifest(request.part).encoded
        if isinstance(request, messages.GetChunkDigests):
            return self.parts.chunk_digests(request.part, request.item)
        return self.parts.read(request.part, request.item, request.chunk)


def fetch(parts: CheckpointParts, root, behaviors: list[Behavior], delay: float) -> tuple[PartStore, bool, Counter]:
    """Receive all parts. Returns the store, whether that ended without an error, and the streams of each holder."""
    store = PartStore.open(root, NAME, parts.checkpoint.revision, BLOCKS, parts.manifests().digests)
    streams: Counter[int] = Counter()
    is_whole = False

    async def scenario() -> None:
        nonlocal is_whole
        hub = MemoryHub(lambda source, target: delay)
        swarm = Swarm(hub)
        holders = [Holder(hub, f"holder-{number}", one, parts) for number, one in enumerate(behaviors)]
        try:
            for one in holders:
                await swarm.add(one.name, one.serve)
            with contextlib.suppress(WeightsUnavailable):
                await swarm.fetch(store, PARTS)
                is_whole = True
        finally:
            await hub.close()
        streams.update({number: one.streams for number, one in enumerate(holders)})

    virtual_time.run(scenario)
    return store, is_whole, streams


def assert_right(parts: CheckpointParts, store: PartStore) -> None:
    """What is held is what there was."""
    for part in store.held:
        manifest = parts.manifest(part)
        expected = b"".join(
            parts.read(part, item, chunk) for item, one in enumerate(manifest.items) for chunk in range(one.chunks)
        )
        if part == FILES:
            assert b"".join((store.folder / one.name).read_bytes() for one in manifest.items) == expected
        else:
            assert store.path(part).read_bytes()[-len(expected) :] == expected


@given(behaviors=st.lists(behaviors, max_size=6), delay=st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=40)
def test_any_holders(tmp_path_factory, parts, behaviors, delay):
    store, is_whole, streams = fetch(parts, tmp_path_factory.mktemp("store"), behaviors, delay)
    event("whole" if is_whole else "not whole")
    assert_right(parts, store)
    honest = {part for one in behaviors if one.kind == "honest" for part in one.parts}
    if is_whole or honest >= set(PARTS):
        assert is_whole
        assert store.held == set(PARTS)
    for number, one in enumerate(behaviors):
        if one.kind in ("honest", "lies", "refuses"):
            assert streams[number] <= 1, "it is not asked again and again"


@pytest.mark.parametrize("delay", [0.0, 1.0, 2.0])
def test_silent_peers_do_not_keep_an_honest_one_from_being_asked(tmp_path, parts, delay):
    """They may be many, come first, and stay silent."""
    silent = Behavior("silent", 0, frozenset(PARTS))
    store, is_whole, _ = fetch(parts, tmp_path, [silent] * 9 + [Behavior("honest", 0, frozenset(PARTS))], delay)
    assert is_whole
    assert_right(parts, store)


def test_what_a_peer_has_kept_to_itself_comes_from_another(tmp_path, parts):
    """It was asked for the last chunks and hangs; the other has a slow link."""
    hanging = Behavior("hangs", 12, frozenset(PARTS))
    store, is_whole, _ = fetch(parts, tmp_path, [hanging, Behavior("honest", 0, frozenset(PARTS))], 3.0)
    assert is_whole
    assert_right(parts, store)


def test_a_peer_that_has_nothing_more_is_left_alone(tmp_path, parts):
    """Others have the rest, and send for a while."""
    few, rest = frozenset([FILES, CLIENT]), frozenset(PARTS) - {FILES, CLIENT}
    _, is_whole, streams = fetch(parts, tmp_path, [Behavior("honest", 0, few), Behavior("honest", 0, rest)], 0.05)
    assert is_whole
    assert streams == {0: 1, 1: 1}
