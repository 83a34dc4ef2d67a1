"""Preparing blocks: their weights are read from the checkpoint once, and written as packed files."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.common import console
from swarm.common.files.folders import nearest_folder
from swarm.common.units import format_bytes
from swarm.errors import NotEnoughSpace, PackedFileError, format_blocks
from swarm.models.block_loading import load_block, return_freed_memory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.files.block_files import (
    BlockFiles,
    PackedModel,
    packed_files,
    preparation_lock,
    unusable_folder,
)
from swarm.models.flash.files.manifest import Manifest, encode_manifest
from swarm.models.flash.files.prepared_block import PreparedBlock, open_block
from swarm.models.flash.files.record_writing import record_bytes, safetensors_bytes, sync_folder, write_file
from swarm.models.flash.planned_blocks import PlannedBlock, block_tensors, check_tensors

SPARE_BYTES = 64 << 20
"""Free space that preparation leaves on the drive."""


@dataclass(frozen=True)
class DriveSpace:
    """What a drive has room for.

    Attributes:
        free: bytes.
        written: for blocks that have packed files, by block and kind of record, the bytes of these. Files that are
            written again take their place.
    """

    free: int
    written: Mapping[tuple[int, str], int]

    def holds(self, planned: Mapping[int, PlannedBlock]) -> bool:
        """Whether there is room for the packed files of these blocks."""
        needed = self.needed(planned)
        return needed == 0 or needed + SPARE_BYTES <= self.free

    def needed(self, planned: Mapping[int, PlannedBlock]) -> int:
        """Bytes that the packed files of these blocks take beyond those that are there."""
        kept = self.written
        return sum(max(0, one.size - kept.get((block, one.plan.kind), 0)) for block, one in planned.items())


def drive_space(model: PackedModel) -> DriveSpace:
    """What the drive of a model's packed files has room for now. Raises `PackedFileError` if it cannot be looked at."""
    written: dict[tuple[int, str], int] = {}
    try:
        status = os.statvfs(nearest_folder(model.folder))
        for file in packed_files(model.folder) if model.folder.is_dir() else ():
            if not file.part.startswith("predictor"):
                place = file.block, file.kind
                written[place] = written.get(place, 0) + file.size()
    except OSError as error:
        raise unusable_folder(model.root, error) from None
    return DriveSpace(status.f_bavail * status.f_frsize, written)


def check_space(model: PackedModel, planned: Mapping[int, PlannedBlock]) -> None:
    """Raise `NotEnoughSpace` unless the drive has room for the packed files of these blocks."""
    space = drive_space(model)
    if not space.holds(planned):
        raise NotEnoughSpace(
            f"the packed weights of blocks {format_blocks(planned)} of {model.name} need "
            f"{format_bytes(space.needed(planned))}, and {model.root} has {format_bytes(space.free)} free: remove "
            "others from there, take fewer blocks, or choose another drive with --cache-dir"
        )


logger = logging.getLogger(__name__)


def open_span(
    checkpoint: Checkpoint,
    planned: Mapping[int, PlannedBlock],
    *,
    dtype: torch.dtype,
    root: Path,
    progress: bool = False,
) -> dict[int, PreparedBlock]:
    """The planned blocks, checked and open; the packed files of those that have none, or unusable ones, are written.

    One block after the other is loaded and written, so peak memory is that of loading one block. Blocks that are
    finished stay finished if the process is killed. If another process prepares blocks of the same model, this one
    waits for it, with a message.

    Args:
        planned: see `planned_blocks.plan_span`, with the same dtype.
        dtype: in which the weights are stored and computed with.
        root: the folder of all packed files, see `flash_root`.
        progress: whether to show progress.

    Raises:
        NotEnoughSpace: the drive is too small. Before anything is written, or in the middle if others fill it.
        CheckpointError: weights are missing, unreadable, or quantized.
        PackedFileError: the folder cannot be written, or its drive does not return what was written.
    """
    model = PackedModel.of(checkpoint, dtype, root)
    opened, unusable = open_blocks(checkpoint, model, planned, progress)
    if unusable:
        opened |= _prepare(checkpoint, model, {block: planned[block] for block in unusable}, progress)
    return dict(sorted(opened.items()))


def open_blocks(
    checkpoint: Checkpoint, model: PackedModel, planned: Mapping[int, PlannedBlock], progress: bool = False
) -> tuple[dict[int, PreparedBlock], dict[int, PackedFileError]]:
    """Open those of the planned blocks that can be used; and for each of the others, why it cannot.

    All files are read. If the checkpoint is a folder, its weights are compared with those that were prepared; a
    revision on the hub does not change.
    """
    digests = _stored_digests(checkpoint, planned)
    opened: dict[int, PreparedBlock] = {}
    unusable: dict[int, PackedFileError] = {}
    written = [block for block, one in planned.items() if os.path.exists(model.files(block, one.plan.kind).manifest)]
    title = f"Checking the packed weights of blocks {format_blocks(written)}" if progress and written else None
    with console.progress_bar(title, sum(planned[block].size for block in written), "B") as bar:
        for block, one in planned.items():
            try:
                opened[block] = open_block(model, block, one, digest=digests.get(block), progress=bar.update)
            except PackedFileError as error:
                unusable[block] = error
    return opened, unusable


def _stored_digests(checkpoint: Checkpoint, blocks: Collection[int]) -> dict[int, str]:
    """The digests of these blocks in the checkpoint, as far as its files can be looked at."""
    if not blocks:
        return {}
    first = min(blocks)
    return dict(enumerate(checkpoint.block_digests(first, max(blocks) + 1) or (), start=first))


def _prepare(
    checkpoint: Checkpoint, model: PackedModel, planned: Mapping[int, PlannedBlock], progress: bool
) -> dict[int, PreparedBlock]:
    """Write those of the planned blocks that cannot be used, and open all of them."""
    with preparation_lock(model):
        _remove_unfinished(model)
        opened, unusable = open_blocks(checkpoint, model, planned, progress)
        for block, error in unusable.items():
            if os.path.exists(model.files(block, planned[block].plan.kind).manifest):
                logger.warning("%s; it is prepared again", error)
        if unusable:
            missing = {block: planned[block] for block in unusable}
            _make_room(model, missing)
            title = f"Preparing blocks {format_blocks(missing)}" if progress else None
            with console.progress_bar(title, sum(one.size for one in missing.values()), "B") as bar:
                for block, one in missing.items():
                    _write_block(checkpoint, model, block, one, bar.update)
                    opened[block] = _read_back(model, block, one)
                    return_freed_memory()
    return opened


def _make_room(model: PackedModel, planned: Mapping[int, PlannedBlock]) -> None:
    """Remove what cannot be used of these blocks, and check that there is space to write them."""
    blocks = format_blocks(planned)
    with _write_errors(model, f"blocks {blocks}"):
        model.folder.mkdir(parents=True, exist_ok=True)
        for block, one in planned.items():
            _remove_files(model.files(block, one.plan.kind))
    check_space(model, planned)
    size = format_bytes(sum(one.size for one in planned.values()))
    logger.info("Preparing blocks %s of %s for flash: %s in %s", blocks, model.name, size, model.folder)


def _write_block(
    checkpoint: Checkpoint,
    model: PackedModel,
    block: int,
    planned: PlannedBlock,
    progress: Callable[[int], object],
) -> None:
    whole, digest = load_block(checkpoint, block, model.dtype)
    plan = planned.plan
    tensors = block_tensors(whole.get_submodule(checkpoint.structure.layers_path)[0], plan)
    check_tensors(tensors, planned)
    resident = {name: tensor for name, tensor in tensors.items() if name not in plan.axes}
    files = model.files(block, plan.kind)
    with _write_errors(model, f"block {block}"):
        try:
            contents = (
                write_file(files.records, record_bytes(planned.layout, tensors), progress),
                write_file(files.resident, safetensors_bytes(resident), progress),
            )
            sync_folder(model.folder)
            manifest = Manifest.of(model, block, digest, plan, planned.layout, contents)
            write_file(files.manifest, _bytes(encode_manifest(manifest)))
            sync_folder(model.folder)
        except BaseException:
            _remove_files(files)
            raise


def _read_back(model: PackedModel, block: int, planned: PlannedBlock) -> PreparedBlock:
    """Open a block that was just written. Raises `PackedFileError` if the drive does not return what it was given."""
    try:
        return open_block(model, block, planned, new=True)
    except PackedFileError:
        with suppress(OSError):
            _remove_files(model.files(block, planned.plan.kind))
        raise


def add_predictor(model: PackedModel, prepared: PreparedBlock, data: bytes) -> None:
    """Write the file of a predictor that was trained for a prepared block. An older one is replaced.

    Args:
        data: a safetensors file.

    Raises:
        NotEnoughSpace: the drive is full.
        PackedFileError: the folder cannot be written.
    """
    with preparation_lock(model), _write_errors(model, f"block {prepared.block}"):
        write_file(prepared.files.predictor, _bytes(data))
        sync_folder(model.folder)


def _bytes(data: bytes) -> Iterator[torch.Tensor]:
    yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _write_errors(model: PackedModel, what: str) -> Iterator[None]:
    """Turn what the system says about writing into what the user can do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(
                f"{model.root} became full in the preparation of {what} of {model.name}. Finished blocks are kept: "
                "free some space and start again, or choose another drive with --cache-dir"
            ) from None
        raise unusable_folder(model.root, error) from None


def _remove_unfinished(model: PackedModel) -> None:
    """Remove what preparations left that were killed: files that are not complete, or have no manifest."""
    if not model.folder.is_dir():
        return
    with _write_errors(model, "blocks"):
        found = packed_files(model.folder)
        finished = {(file.block, file.kind) for file in found if file.part == "json" and file.finished}
        for file in found:
            whole = (file.block, file.kind) in finished or file.part.startswith("predictor")
            if not file.finished or not whole:
                file.path.unlink(missing_ok=True)


def _remove_files(files: BlockFiles) -> None:
    """Remove what preparation wrote for a block, the manifest first. Raises `OSError`."""
    for path in (files.manifest, files.records, files.resident):
        path.unlink(missing_ok=True)
