"""Parts on disk: what has come is kept, and nothing counts as held before all of it is right."""

from __future__ import annotations

import ctypes
import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from swarm.errors import NotEnoughSpace, ProtocolViolation, WeightsUnavailable
from swarm.models.checkpoints.part_folder import PARTS_FILE, read_part_folder
from swarm.shared_weights import part_store
from swarm.shared_weights.manifest import (
    CHUNK_BYTES,
    CLIENT,
    FILES,
    Item,
    PartManifest,
    chunk_digest,
    item_digest,
)
from swarm.shared_weights.part_store import Chunk, PartStore, UnfinishedPart, default_root, file_name, folder_name

MODEL, REVISION, BLOCKS = "org/model", "main", 3
SIZES = (5, 0, CHUNK_BYTES + 3, 2 * CHUNK_BYTES, 9)
"""Of the tensors of a block."""

FILE_CONTENT = {"config.json": b'{"model_type": "llama"}', "tokenizer_config.json": b"{}"}


class Source:
    """A part as it should be."""

    def __init__(self, part: str, contents: dict[str, bytes]) -> None:
        self.part, self.contents = part, contents
        self.digests: list[bytes] = []
        items = []
        for name, data in contents.items():
            pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
            self.digests.append(b"".join(map(chunk_digest, pieces)))
            dtype, shape = ("", ()) if part == FILES else ("U8", (len(data),))
            items.append(Item(name, dtype, shape, len(data), item_digest(self.digests[-1])))
        self.manifest = PartManifest(tuple(items))

    def data(self, chunk: Chunk) -> bytes:
        content = list(self.contents.values())[chunk.item]
        return content[chunk.number * CHUNK_BYTES :][: chunk.length]


def block(part: str = "0", seed: int = 0) -> Source:
    contents = {f"{part}.{number}": bytes([1 + number + seed]) * size for number, size in enumerate(SIZES)}
    return Source(part, contents)


BLOCK, JSON = block(), Source(FILES, FILE_CONTENT)
CHUNKS = 1 + 2 + 2 + 1


def open_store(root: Path, *sources: Source) -> PartStore:
    return PartStore.open(root, MODEL, REVISION, BLOCKS, {one.part: one.manifest.digest for one in sources})


def store_with_manifests(root: Path, *sources: Source) -> PartStore:
    store = open_store(root, *sources)
    for one in sources:
        store.add_manifest(one.part, one.manifest.encoded)
    return store


@contextmanager
def begun(store: PartStore, source: Source):
    """A part that is being received."""
    part = UnfinishedPart(store, source.part, source.digests)
    part.open()
    try:
        yield part
    finally:
        part.close()


def receive(store: PartStore, source: Source) -> int:
    """Receive what is missing of a part. Returns the number of chunks."""
    with begun(store, source) as part:
        missing = part.missing()
        for chunk in missing:
            assert part.write(chunk, source.data(chunk))
            assert source.part not in store.held
        part.finish()
    assert source.part in store.held
    return len(missing)


def content(store: PartStore, source: Source) -> dict[str, bytes]:
    if source.part == FILES:
        return {name: (store.folder / name).read_bytes() for name in source.contents}
    return {name: one.numpy().tobytes() for name, one in load_file(store.path(source.part)).items()}


@pytest.mark.parametrize("source", [BLOCK, JSON, block(CLIENT)], ids=lambda source: source.part)
def test_a_part_is_held_when_all_of_it_is_there(tmp_path, source):
    store = store_with_manifests(tmp_path, source)
    assert store.held == set()
    assert store.missing([source.part, "2"]) == [source.part, "2"]
    receive(store, source)
    assert content(store, source) == source.contents
    assert open_store(tmp_path, source).held == {source.part}, "also for the next process"
    assert not store.unfinished_path(source.part).exists()


@given(first=st.sets(st.integers(0, CHUNKS - 1)), second=st.sets(st.integers(0, CHUNKS - 1)))
@settings(max_examples=15)
def test_what_has_come_is_kept(tmp_path_factory, first, second):
    """Whatever came in two attempts that were broken off, the third one asks for the rest."""
    root, there = tmp_path_factory.mktemp("store"), set()
    for attempt in (first, second):
        store = store_with_manifests(root, BLOCK)
        with begun(store, BLOCK) as part:
            chunks = list(part.chunks)
            assert part.missing() == [one for one in chunks if one not in there]
            for number in attempt:
                assert part.write(chunks[number], BLOCK.data(chunks[number]))
                there.add(chunks[number])
        assert store.held == set()
    assert receive(open_store(root, BLOCK), BLOCK) == CHUNKS - len(there)
    assert content(store, BLOCK) == BLOCK.contents


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"\xff" + data[1:]])
def test_a_wrong_chunk_is_not_written(tmp_path, spoil):
    store = store_with_manifests(tmp_path, BLOCK)
    with begun(store, BLOCK) as part:
        before = store.unfinished_path("0").read_bytes()
        for chunk in part.chunks:
            assert not part.write(chunk, spoil(BLOCK.data(chunk)))
            assert store.unfinished_path("0").read_bytes() == before


@pytest.mark.parametrize("source", [BLOCK, JSON], ids=lambda source: source.part)
def test_a_file_that_others_have_changed_is_not_used(tmp_path, source):
    store = store_with_manifests(tmp_path, source)
    with begun(store, source) as part:
        for chunk in part.missing():
            part.write(chunk, source.data(chunk))
    path = store.unfinished_path(source.part)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert receive(open_store(tmp_path, source), source) == 1
    assert content(store, source) == source.contents


def test_weights_by_another_digest_are_not_taken_for_the_trusted_ones(tmp_path):
    """They have the same shapes, so their files have the same sizes; what was believed first may have been wrong."""
    wrong, wrong_files = block(seed=100), Source(FILES, {**FILE_CONTENT, "config.json": b'{"model_type": "lambs"}'})
    old = store_with_manifests(tmp_path, wrong, wrong_files)
    receive(old, wrong)
    receive(old, wrong_files)
    store = open_store(tmp_path, BLOCK, JSON)
    assert store.held == set()
    for one in (BLOCK, JSON):
        store.add_manifest(one.part, one.manifest.encoded)
    assert store.held == open_store(tmp_path, BLOCK, JSON).held == set()
    for one in (BLOCK, JSON):
        receive(store, one)
        assert content(store, one) == one.contents


def test_a_manifest_must_be_the_trusted_one(tmp_path):
    store = open_store(tmp_path, BLOCK)
    for part, manifest in (("0", block(seed=1).manifest), ("1", BLOCK.manifest)):
        with pytest.raises(ProtocolViolation, match="not the one that the model's source has"):
            store.add_manifest(part, manifest.encoded)
    with pytest.raises(ProtocolViolation, match="not a manifest"):
        store.add_manifest("0", b"\xc1")
    assert store.manifests == {}


def test_the_folder_says_where_tensors_are(tmp_path):
    store = store_with_manifests(tmp_path, BLOCK, JSON)
    found = read_part_folder(store.folder)
    assert found is not None
    assert (found.model, found.revision, found.blocks) == (MODEL, REVISION, BLOCKS)
    assert found.weight_map == dict.fromkeys(BLOCK.contents, "block-00000.safetensors") == store.weight_map
    (store.folder / PARTS_FILE).write_text("no JSON")
    assert open_store(tmp_path, BLOCK, JSON).weight_map == store.weight_map
    assert read_part_folder(store.folder) == found


def test_a_file_whose_name_is_a_path_is_not_written(tmp_path):
    outside = Source(FILES, {"../../config.json": b"{}"})
    store = store_with_manifests(tmp_path / "root", outside)
    with begun(store, outside) as part:
        for chunk in part.missing():
            part.write(chunk, outside.data(chunk))
        with pytest.raises(ProtocolViolation, match="no file of this name travels"):
            part.finish()
    assert not (tmp_path / "config.json").exists()
    assert store.held == set()


def test_two_processes_do_not_receive_the_same_part(tmp_path):
    first, second = store_with_manifests(tmp_path, BLOCK), open_store(tmp_path, BLOCK)
    with begun(first, BLOCK):
        with pytest.raises(WeightsUnavailable, match=r"another process receives part 0.*--cache-dir"):
            UnfinishedPart(second, "0", BLOCK.digests).open()
    receive(second, BLOCK)


@pytest.mark.parametrize("source", [BLOCK, JSON], ids=lambda source: source.part)
def test_a_part_that_another_process_finishes_between_open_and_lock(tmp_path, monkeypatch, source):
    """The file that was opened then has another name, or none."""
    store, other = store_with_manifests(tmp_path, source), open_store(tmp_path, source)
    lock = fcntl.flock

    def finish_first(descriptor, operation):
        monkeypatch.setattr(part_store.fcntl, "flock", lock)
        receive(other, source)
        lock(descriptor, operation)

    monkeypatch.setattr(part_store.fcntl, "flock", finish_first)
    assert receive(store, source) == 0
    assert content(store, source) == source.contents


@contextmanager
def small_drive(folder: Path, size: int):
    """A drive of so many bytes, as `mount -t tmpfs` makes it."""
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or library.mount(b"swarm", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip("only root may mount a small drive")
    try:
        yield
    finally:
        assert library.umount2(os.fsencode(folder), 2) == 0


@pytest.mark.parametrize("room", [2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 4096])
def test_a_full_drive(tmp_path, monkeypatch, room):
    """The drive takes the first bytes of a chunk, and not the others: such a chunk has not been written."""
    monkeypatch.setattr(part_store, "SPARE_BYTES", 0)
    with small_drive(tmp_path, room + 16384):
        store = store_with_manifests(tmp_path, BLOCK)
        with pytest.raises(NotEnoughSpace, match=r"need .* more, and the drive .* has .* free.*--cache-dir"):
            store.require_space(["0"])
        written = []
        with begun(store, BLOCK) as part:

            def write_all():
                for chunk in part.chunks:
                    part.write(chunk, BLOCK.data(chunk))
                    written.append(chunk)

            with pytest.raises(NotEnoughSpace, match=r"is full.*--cache-dir"):
                write_all()
            assert [one for one in part.chunks if one not in written] == part.missing()
        assert written
        assert open_store(tmp_path, BLOCK).held == set()


def test_a_drive_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    store = store_with_manifests(tmp_path, BLOCK)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    with begun(store, BLOCK) as part:
        chunk = next(part.chunks)
        part.write(chunk, BLOCK.data(chunk))
        monkeypatch.setattr(part_store.os, "pread", fail)
        with pytest.raises(WeightsUnavailable, match="Input/output error"):
            part.missing()


def test_folders_of_models_can_be_told_apart(tmp_path, monkeypatch):
    assert folder_name("org/My model", "main").startswith("My-model-")
    assert folder_name("a/model", "main") != folder_name("b/model", "main")
    assert file_name("12") == "block-00012.safetensors"
    assert default_root(tmp_path) == tmp_path / "swarm-weights"
    monkeypatch.setattr(part_store, "cache_folder", lambda: None)
    with pytest.raises(WeightsUnavailable, match="--cache-dir"):
        default_root()
