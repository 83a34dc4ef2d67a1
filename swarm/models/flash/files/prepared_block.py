"""A prepared block: its packed files, found, checked and in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import BlockPlan
from swarm.models.flash.files.block_files import BlockFiles, PackedModel
from swarm.models.flash.files.manifest import (
    FileContent,
    Manifest,
    check_sizes,
    read_manifest,
    verify_parts,
)
from swarm.models.flash.planned_blocks import PlannedBlock
from swarm.models.flash.records import RecordLayout


class PreparedBlock:
    """A block whose packed files were checked.

    Create one with `open_block`.

    Attributes:
        block: index in the whole model.
        plan: what of the block lies in records.
        layout: of the records.
        digest: of the block's tensors in the checkpoint, as servers announce it.
        files: where the files lie; the records are in `files.records`.
    """

    def __init__(self, manifest: Manifest, files: BlockFiles) -> None:
        self.block = manifest.block
        self.plan: BlockPlan = manifest.plan
        self.layout: RecordLayout = manifest.layout
        self.digest = manifest.digest
        self.files = files

    @property
    def records(self) -> Path:
        """The file of the records: record i lies at `i * layout.stride`."""
        return self.files.records

    def resident_tensors(self) -> dict[str, torch.Tensor]:
        """The block's other tensors, by their names inside the loaded block, copied into memory.

        Raises `PackedFileError` if they cannot be read any more.
        """
        try:
            return _read_tensors(self.files.resident)
        except (SafetensorError, OSError) as error:
            raise PackedFileError(f"{self.files.resident} cannot be read: {error}") from None


def open_block(
    model: PackedModel,
    block: int,
    planned: PlannedBlock,
    *,
    digest: str | None = None,
    new: bool = False,
    progress: Callable[[int], object] = lambda size: None,
) -> PreparedBlock:
    """Check a block's packed files. All bytes are read and compared with their digests.

    Args:
        planned: what preparation would write now; files that were prepared in another way are refused.
        digest: of the block's tensors in the checkpoint; files of other weights are refused.
        new: whether this process has just written the files.
        progress: called with the bytes of each part that was compared.

    Raises:
        PackedFileError: the block is not prepared, or its files cannot be used; the message names the block.
    """
    try:
        manifest = _checked_manifest(model, block, planned, digest, progress)
    except FileNotFoundError:
        raise PackedFileError(f"block {block} of {model.name} is not prepared for flash") from None
    except PackedFileError as error:
        if new:
            raise PackedFileError(
                f"the drive of {model.folder} does not return what was written to it: {error}. Check that drive, or "
                "choose another with --cache-dir"
            ) from None
        raise PackedFileError(f"block {block} of {model.name} cannot be read from flash: {error}") from None
    return PreparedBlock(manifest, model.files(block, planned.plan.kind))


def _checked_manifest(
    model: PackedModel, block: int, planned: PlannedBlock, digest: str | None, progress: Callable[[int], object]
) -> Manifest:
    """The manifest of files that can be used. Raises `FileNotFoundError` if there is none, and `PackedFileError`."""
    files = model.files(block, planned.plan.kind)
    manifest = read_manifest(files.manifest, model, block, planned.plan, planned.layout)
    if digest is not None and manifest.digest != digest:
        raise PackedFileError("the checkpoint's weights have changed since")
    check_sizes(manifest, files)
    _check_content(files.records, manifest.records, progress)
    _check_content(files.resident, manifest.resident, progress)
    _check_names(manifest.plan, files.resident)
    return manifest


def _check_content(path: Path, content: FileContent, progress: Callable[[int], object]) -> None:
    """Raise `PackedFileError` unless the file holds what was written."""
    try:
        verify_parts(path, content.parts, progress)
    except OSError as error:
        raise PackedFileError(f"{path.name} cannot be read ({error.strerror})") from None


def _check_names(plan: BlockPlan, resident: Path) -> None:
    """Raise `PackedFileError` unless the file is a safetensors file with the tensors that the plan leaves in memory."""
    try:
        with safe_open(resident, framework="pt") as file:
            names = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise PackedFileError(f"{resident.name} is not a safetensors file ({error})") from None
    if not names.issuperset(plan.resident) or names.intersection(plan.axes):
        raise PackedFileError(f"{resident.name} holds other tensors than the plan says")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Copied, or one small tensor would keep the whole mapping of the file alive."""
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return {name: file.get_tensor(name).clone() for name in names}
