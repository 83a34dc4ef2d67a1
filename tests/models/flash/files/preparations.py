"""Prepared models for tests, and processes that prepare them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.data_structures import Span
from swarm.models.block_loading import load_block
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.flash.files import preparation
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.prepared_block import PreparedBlock, open_block
from swarm.models.flash.planned_blocks import PlannedBlock, PlanOf, plan_span
from swarm.models.flash.records import RecordBuffer
from tests import zoo
from tests.models.flash.largest_plan import plan_largest


def make_checkpoint(folder: Path, family: str = "llama") -> Checkpoint:
    """A tiny model of the zoo."""
    return open_checkpoint(zoo.make_checkpoint(family, folder / family))


def prepare(checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, root: Path, plan_of: PlanOf) -> list[int]:
    """Prepare a span. Returns the blocks that were written."""
    written: list[int] = []
    write = preparation._write_block

    def noted(checkpoint: Checkpoint, model: PackedModel, block: int, *rest: Any) -> None:
        write(checkpoint, model, block, *rest)
        written.append(block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_write_block", noted)
        open_span(checkpoint, span, dtype=dtype, root=root, plan_of=plan_of)
    return written


def open_span(
    checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, root: Path, plan_of: PlanOf
) -> dict[int, PreparedBlock]:
    """Plan a span, and open its prepared blocks."""
    return preparation.open_span(checkpoint, plan_span(checkpoint, span, dtype, plan_of), dtype=dtype, root=root)


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every drive seem to have about so many bytes free: whole pages."""
    status = list(os.statvfs("/"))
    status[0:2], status[4] = [4096, 4096], -(-free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(status))


def packed(checkpoint: Checkpoint, root: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return PackedModel.of(checkpoint, dtype, root)


def planned_block(
    checkpoint: Checkpoint, block: int, dtype: torch.dtype = torch.float32, plan_of: PlanOf = plan_largest
) -> PlannedBlock:
    return plan_span(checkpoint, Span(block, block + 1), dtype, plan_of)[block]


def open_packed(
    checkpoint: Checkpoint, root: Path, block: int, dtype: torch.dtype = torch.float32, plan_of: PlanOf = plan_largest
) -> PreparedBlock:
    """Open a block that was prepared as `plan_of` says."""
    return open_block(packed(checkpoint, root, dtype), block, planned_block(checkpoint, block, dtype, plan_of))


def read_records(prepared: PreparedBlock) -> dict[str, torch.Tensor]:
    """The tensors that became records, put together again from their file."""
    layout = prepared.layout
    buffer = RecordBuffer(layout, layout.count)
    data = torch.frombuffer(bytearray(prepared.records.read_bytes()), dtype=torch.uint8)
    buffer.data.copy_(data.view(layout.count, layout.stride))
    tensors = {}
    for field in layout.fields:
        parts = buffer.field(field.tensor).view(layout.count, *field.shape)
        tensors[field.tensor] = parts[0] if field.axis is None else parts.movedim(0, field.axis)
    return tensors


def assert_holds_block(prepared: PreparedBlock, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Records and resident tensors are those of the loaded block, bit for bit, and nothing is missing or twice."""
    whole, digest = load_block(checkpoint, prepared.block, dtype)
    expected = whole.get_submodule(checkpoint.structure.layers_path)[0].state_dict()
    records, resident = read_records(prepared), prepared.resident_tensors()
    assert not records.keys() & resident.keys()
    found = records | resident
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert prepared.digest == digest
