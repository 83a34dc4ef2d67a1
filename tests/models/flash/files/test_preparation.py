"""Preparing blocks: what is written, what is kept, and what is left when something goes wrong in the middle."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch

from swarm.common import console
from swarm.data_structures import Span
from swarm.errors import CheckpointError, InvalidSpan, NotEnoughSpace, PackedFileError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.block_plan import BlockPlan, RecordKind
from swarm.models.flash.files import preparation, record_writing
from swarm.models.flash.files.block_files import PackedModel, packed_files
from swarm.models.flash.files.preparation import SPARE_BYTES, DriveSpace, check_space, drive_space
from swarm.models.flash.planned_blocks import PlannedBlock, plan_span
from swarm.models.flash.records import RecordLayout
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
        ("mixtral", torch.float16, plan_streamed),
        ("deepseek_v3", torch.bfloat16, plan_streamed),
        *((family, torch.bfloat16, plan_largest) for family in ("mixtral", "opt", "gpt2", "deepseek_v3", "gpt_oss")),
    ],
)
def test_what_is_written_is_the_loaded_block(tmp_path, family, dtype, plan_of):
    checkpoint = make_checkpoint(tmp_path, family)
    span = Span(0, checkpoint.blocks)
    assert prepare(checkpoint, span, dtype=dtype, root=tmp_path, plan_of=plan_of) == list(range(span.end))
    for block in range(span.end):
        prepared = open_packed(checkpoint, tmp_path, block, dtype, plan_of)
        assert_holds_block(prepared, checkpoint, dtype)
        prepared.close()


def test_finished_blocks_are_kept(llama, root):
    assert prepare_llama(llama, root, Span(1, 3)) == [1, 2]
    before = contents(llama, root)
    assert prepare_llama(llama, root, Span(1, 4)) == [3]
    after = contents(llama, root)
    assert {name: after[name] for name in before} == before


def test_progress_is_logged_where_there_is_no_terminal(llama, root, monkeypatch, caplog):
    monkeypatch.setattr(console, "PROGRESS_INTERVAL_S", 0.0)
    planned = plan_span(llama, MIDDLE, torch.float32, plan_largest)
    for done in ("Preparing blocks 1:4", "Checking the packed weights of blocks 1:4"):
        with caplog.at_level(logging.INFO):
            opened = preparation.open_span(llama, planned, dtype=torch.float32, root=root, progress=True)
        said = [line for line in caplog.messages if line.startswith(f"{done}: ")]
        assert len(said) >= len(opened)
        assert all(" KB of " in line and "left" in line for line in said)
        caplog.clear()
        for prepared in opened.values():
            prepared.close()


def test_preparing_again_gives_the_same_bytes(llama, root, tmp_path):
    prepare_llama(llama, root)
    prepare_llama(llama, tmp_path / "other")
    first, second = contents(llama, root), contents(llama, tmp_path / "other")
    assert {name: data for name, (data, _) in first.items()} == {name: data for name, (data, _) in second.items()}


def test_blocks_of_which_nothing_goes_to_flash_are_left_out(llama, root):
    def plan_some(block) -> BlockPlan | None:
        return plan_largest(block) if block.self_attn.layer_idx % 2 else None

    assert prepare_llama(llama, root, Span(0, 5), plan_some) == [1, 3]
    opened = open_span(llama, Span(0, 5), dtype=torch.float32, root=root, plan_of=plan_some)
    assert list(opened) == [1, 3]


def test_dtypes_and_revisions_lie_side_by_side(llama, root):
    for dtype in (torch.float32, torch.bfloat16):
        assert prepare(llama, Span(0, 1), dtype=dtype, root=root, plan_of=plan_largest) == [0]
    assert len([path for path in root.iterdir() if path.name.startswith("llama@")]) == 2


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


def test_another_plan_of_the_same_kind_prepares_anew(llama, root):
    prepare_llama(llama, root)
    assert prepare_llama(llama, root, plan_of=plan_attention) == [1, 2, 3]
    assert prepare_llama(llama, root, plan_of=plan_attention) == []


def plan_attention(block) -> BlockPlan:
    return BlockPlan(RecordKind.NEURONS, {"up": "self_attn.q_proj"}, {"self_attn.q_proj.weight": 0})


def test_records_of_two_kinds_are_used_at_the_same_time(llama, root):
    """As by two servers: neither one's files are touched when the other one prepares its own."""
    plans = (plan_largest, plan_streamed)
    one, other = (open_span(llama, MIDDLE, dtype=torch.float32, root=root, plan_of=plan_of) for plan_of in plans)
    for prepared in (*one.values(), *other.values()):
        assert prepared.new
        assert_holds_block(prepared, llama, torch.float32)
    before = contents(llama, root)
    for plan_of in plans:
        assert prepare_llama(llama, root, plan_of=plan_of) == []
    assert contents(llama, root) == before


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


def test_a_drive_that_forgets_what_was_written(llama, root, monkeypatch):
    """Found when it is read back, and named; blocks before it are kept, and nothing of it is."""
    replace = os.replace

    def replace_and_forget(source, target) -> None:
        if target.name == "block-0002.neurons.records":
            damage(source, "bit flipped")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_and_forget)
    with pytest.raises(PackedFileError, match=r"the drive of .* does not return what was written to it: block-0002"):
        prepare_llama(llama, root)
    monkeypatch.undo()
    assert {file.block for file in packed_files(packed(llama, root).folder)} == {1}
    assert prepare_llama(llama, root) == [2, 3]


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


def test_short_writes_are_continued(llama, root, monkeypatch):
    write = os.write
    monkeypatch.setattr(record_writing.os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    prepare_llama(llama, root, Span(2, 3))
    monkeypatch.undo()
    assert_holds_block(open_packed(llama, root, 2), llama, torch.float32)


def test_a_folder_that_cannot_be_written(llama, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PackedFileError, match=r"cannot be used .*; choose a folder on a local drive"):
        prepare_llama(llama, tmp_path / "file" / "swarm-flash")


def test_blocks_that_the_model_lacks(llama, root):
    with pytest.raises(InvalidSpan):
        prepare_llama(llama, root, Span(4, 9))
    assert not root.exists()


def test_a_checkpoint_that_computes_in_a_special_form_is_refused(llama, root, monkeypatch):
    load = preparation.load_block

    def load_quantized(checkpoint, block, dtype):
        whole, digest = load(checkpoint, block, dtype)
        layer = whole.get_submodule(checkpoint.structure.layers_path)[0]
        layer.mlp.up_proj.register_buffer("weight_scale", torch.ones(1))
        return whole, digest

    monkeypatch.setattr(preparation, "load_block", load_quantized)
    with pytest.raises(CheckpointError, match=r"in a special form \(mlp.up_proj.weight_scale\)"):
        prepare_llama(llama, root)


def test_a_plan_whose_tensors_are_in_another_dtype_is_a_mistake(llama, root):
    def plan_wrong(block):
        block.mlp.up_proj.to(torch.float64)
        return plan_largest(block)

    with pytest.raises(ValueError, match=r"mlp\.\w+\.weight, which is torch.float64"):
        prepare_llama(llama, root, plan_of=plan_wrong)


LAYOUT = RecordLayout.of({"w": (10, 1024)}, {"w": 0}, torch.float32)
PLANNED = {block: PlannedBlock(BlockPlan(RecordKind.EXPERTS, {}, {}), LAYOUT, {}, 1000) for block in range(4)}
SIZE = PLANNED[0].size


@pytest.fixture
def model(tmp_path) -> PackedModel:
    return PackedModel(tmp_path / "cache" / "swarm-flash", "model", "0", torch.float32, "model")


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_what_is_prepared_needs_no_more_space(model):
    files = model.files(1, RecordKind.EXPERTS)
    write(files.records, LAYOUT.file_bytes)
    write(files.resident, 1000)
    write(files.predictor, 5000)
    write(model.files(2, RecordKind.EXPERTS).records.with_suffix(".records.unfinished"), 500)
    write(model.files(3, RecordKind.BLOCK).records, 700)
    space = drive_space(model)
    assert space.written == {(1, "experts"): SIZE, (2, "experts"): 500, (3, "block"): 700}
    assert space.needed(PLANNED) == 3 * SIZE - 500
    assert space.needed({1: PLANNED[1]}) == 0


def test_some_space_is_left_unless_nothing_is_written():
    assert DriveSpace(SIZE + SPARE_BYTES, {}).holds({0: PLANNED[0]})
    assert not DriveSpace(SIZE + SPARE_BYTES - 1, {}).holds({0: PLANNED[0]})
    assert DriveSpace(0, {(0, "experts"): SIZE}).holds({0: PLANNED[0]})


def test_a_drive_that_is_too_small_is_refused(model, monkeypatch):
    set_free_space(monkeypatch, SPARE_BYTES + 3 * SIZE)
    check_space(model, {block: PLANNED[block] for block in range(2)})
    with pytest.raises(NotEnoughSpace, match=r"blocks 0:4 of model need .* and .* free: remove others"):
        check_space(model, PLANNED)


def test_a_folder_that_cannot_be_looked_at(model, monkeypatch):
    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fail)
    with pytest.raises(PackedFileError, match=r"cannot be used \(Input/output error\)"):
        drive_space(model)
