"""Whether a drive has room for the packed files of blocks: asked before any weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.common.files.folders import nearest_folder
from swarm.common.units import format_bytes
from swarm.errors import NotEnoughSpace, format_blocks
from swarm.models.flash.files.block_files import PackedModel, packed_files
from swarm.models.flash.files.folder_locks import unusable_folder
from swarm.models.flash.files.planned_blocks import PlannedBlock

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
            "others (swarm flash show, swarm flash clean), take fewer blocks, or choose another drive with --cache-dir"
        )
