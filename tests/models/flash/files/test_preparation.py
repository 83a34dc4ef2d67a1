"""Preparing blocks: what is written, what is kept, and what is left when something goes wrong in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os

import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import NotEnoughSpace
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files import preparation, record_writing
from swarm.models.flash.files.block_files import packed_files
from swarm.models.flash.files.manifest import FORMAT_VERSION
from swarm.models.flash.streaming import plan_streamed
from tests.models.flash.files.preparations import (
    assert_holds_block,
    make_checkpoint,
    open_packed,
    open_span,
    packed,
    prepare,
    set_free_space,
)
from tests.models.flash.largest_plan import plan_largest


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache" / "swarm-flash"


MIDDLE = Span(1, 4)


def prepare_llama(llama, root, span=MIDDLE, plan_of=plan_largest) -> list[int]:
    return prepare(llama, span, dtype=torch.float32, root=root, plan_of=plan_of)


def contents(llama, root) -> dict[str, tuple[bytes, int]]:
    """Name to content and inode of each file."""
    folder = packed(llama, root).folder
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("family", "dtype", "plan_of"),
    [
        ("llama", torch.float32, plan_streamed),
        ("deepseek_v3", torch.bfloat16, plan_streamed),
        ("mixtral", torch.float16, plan_largest),
        ("gpt2", torch.bfloat16, plan_largest),
    ],
)
def test_what_is_written_is_the_loaded_block(tmp_path, family, dtype, plan_of):
    checkpoint = make_checkpoint(tmp_path, family)
    span = Span(0, checkpoint.blocks)
    assert prepare(checkpoint, span, dtype=dtype, root=tmp_path, plan_of=plan_of) == list(range(span.end))
    for block in range(span.end):
        prepared = open_packed(checkpoint, tmp_path, block, dtype, plan_of)
        assert_holds_block(prepared, checkpoint, dtype)


def test_finished_blocks_are_kept(llama, root):
    assert prepare_llama(llama, root, Span(1, 3)) == [1, 2]
    before = contents(llama, root)
    assert prepare_llama(llama, root, Span(1, 4)) == [3]
    after = contents(llama, root)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ("part", "fault"),
    [("records", "truncated"), ("records", "bit flipped"), ("resident", "longer"), ("manifest", "removed")],
)
def test_a_broken_block_is_prepared_again_and_the_others_are_kept(llama, root, part, fault, caplog):
    prepare_llama(llama, root)
    before = contents(llama, root)
    damage(getattr(packed(llama, root).files(2, RecordKind.NEURONS), part), fault)
    with caplog.at_level(logging.WARNING):
        assert prepare_llama(llama, root) == [2]
    if (part, fault) != ("manifest", "removed"):
        assert "block 2 of llama cannot be read from flash" in caplog.text
    after = contents(llama, root)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    assert {name for name in after if after[name][1] != before[name][1]} <= {name for name in after if "0002" in name}


def test_blocks_of_a_newer_version_of_the_program_are_prepared_again(llama, root, caplog):
    prepare_llama(llama, root, Span(2, 3))
    content = json.dumps({"format": FORMAT_VERSION + 1, "and": "what only that version knows"})
    digest = hashlib.sha256(content.encode()).hexdigest()
    manifest = packed(llama, root).files(2, RecordKind.NEURONS).manifest
    manifest.write_text(f'{{"sha256":"{digest}","content":{content}}}')
    with caplog.at_level(logging.WARNING):
        assert prepare_llama(llama, root, Span(2, 3)) == [2]
    assert f"it has format {FORMAT_VERSION + 1}, this program writes and reads format {FORMAT_VERSION}" in caplog.text


def damage(path, fault: str) -> None:
    data = bytearray(path.read_bytes())
    if fault == "removed":
        path.unlink()
        return
    if fault == "truncated":
        del data[-1]
    elif fault == "longer":
        data += b"\0"
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_server_prepares_what_is_missing_or_broken(llama, root):
    prepare_llama(llama, root, Span(1, 3))
    damage(packed(llama, root).files(1, RecordKind.NEURONS).records, "bit flipped")
    opened = open_span(llama, Span(0, 3), dtype=torch.float32, root=root, plan_of=plan_largest)
    assert list(opened) == [0, 1, 2]
    for prepared in opened.values():
        assert_holds_block(prepared, llama, torch.float32)


def test_changed_weights_under_the_same_name_and_revision_are_prepared_anew(tmp_path, root):
    checkpoint = make_checkpoint(tmp_path)
    prepare_llama(checkpoint, root)
    shard = tmp_path / "llama" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    name = data.index(b'"model.layers.2.mlp.down_proj.weight"')
    start = int(data[data.index(b"[", data.index(b"data_offsets", name)) + 1 :].split(b",")[0])
    header = int.from_bytes(data[:8], "little")
    data[8 + header + start] ^= 1
    shard.write_bytes(data)
    changed = open_checkpoint(tmp_path / "llama")
    assert changed.revision == checkpoint.revision
    assert prepare_llama(changed, root) == [2]
    opened = open_span(changed, Span(1, 4), dtype=torch.float32, root=root, plan_of=plan_largest)
    for prepared in opened.values():
        assert_holds_block(prepared, changed, torch.float32)


def test_too_little_space_is_found_before_anything_is_written(llama, root, monkeypatch):
    set_free_space(monkeypatch, preparation.SPARE_BYTES)
    with pytest.raises(NotEnoughSpace, match=r"blocks 1:4 of llama need .* KB, and .* has 67.1 MB free: remove others"):
        prepare_llama(llama, root)
    assert contents(llama, root) == {}


@pytest.mark.parametrize("share", [0, 0.6, 0.99])
def test_a_drive_that_fills_up_in_the_middle(llama, root, tmp_path, monkeypatch, share):
    """At the first write, at the last one (a manifest), and in between."""
    monkeypatch.setattr(record_writing.os, "write", full_drive := FullDrive())
    prepare_llama(llama, tmp_path / "counted")
    full_drive.room = int(share * full_drive.writes)
    with pytest.raises(NotEnoughSpace, match=r"became full in the preparation of block . of llama"):
        prepare_llama(llama, root)
    monkeypatch.undo()
    assert_only_complete_blocks(llama, root)
    written = prepare_llama(llama, root)
    assert (written == [1, 2, 3]) == (share < 0.33)
    for block in range(1, 4):
        assert_holds_block(open_packed(llama, root, block), llama, torch.float32)


class FullDrive:
    """`os.write` to a drive that has room for some writes.

    Attributes:
        room: how many writes it still takes; None for any number.
        writes: how many there were.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self.writes = 0
        self._write = os.write

    def __call__(self, descriptor, data) -> int:
        self.writes += 1
        if self.room is not None:
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data)


def assert_only_complete_blocks(llama, root) -> None:
    found = packed_files(packed(llama, root).folder)
    blocks = {file.block for file in found}
    assert all(file.finished for file in found)
    assert all(len([file for file in found if file.block == block]) == 3 for block in blocks)
    assert len(os.listdir(packed(llama, root).folder)) == len(found)
