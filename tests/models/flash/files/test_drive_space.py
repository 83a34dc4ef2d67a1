"""Whether a drive has room for packed files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from swarm.errors import NotEnoughSpace, PackedFileError
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.drive_space import SPARE_BYTES, DriveSpace, check_space, drive_space
from swarm.models.flash.files.planned_blocks import PlannedBlock
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.records.record_layout import RecordLayout
from tests.models.flash.files.preparations import set_free_space

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
