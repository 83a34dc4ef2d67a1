"""A folder with parts of a model: some of its blocks, perhaps the client's part, with the whole model's name.

It is an ordinary folder of safetensors and JSON, with one more file, which says what the model is called, of which
revision it is, and in which file each tensor is, or would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.common.files.atomic_file import read_small
from swarm.common.files.checked_json import fields, integer, items, mapping, parse_json, text, to_json
from swarm.models.checkpoints.config_limits import MAX_BLOCKS

PARTS_FILE = "swarm-parts.json"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_NAME_CHARACTERS = 1024
MAX_TENSORS = 1 << 20


@dataclass(frozen=True)
class PartFolder:
    """What a folder with parts of a model says of itself.

    Attributes:
        model, revision: of the model whose parts they are, see `Checkpoint`.
        blocks: of the whole model.
        weight_map: for each tensor's name, its file, which may be missing. It may grow while more becomes known.
        stored: for tensors whose files are missing, as far as it is known, `Checkpoint.stored_tensors`.
    """

    model: str
    revision: str
    blocks: int
    weight_map: dict[str, str]
    stored: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The content of `PARTS_FILE`."""
        tensors: dict[str, list[str]] = {}
        for name, file in self.weight_map.items():
            tensors.setdefault(file, []).append(name)
        value = {
            "format": FORMAT_VERSION,
            "model": self.model,
            "revision": self.revision,
            "blocks": self.blocks,
            "tensors": tensors,
        }
        return to_json(value, indent=1) + b"\n"


def read_part_folder(folder: Path) -> PartFolder | None:
    """What `PARTS_FILE` says; None if the folder has none. Raises `ValueError`, `RecursionError` or `OSError`."""
    try:
        data = read_small(folder / PARTS_FILE, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    version, model, revision, blocks, tensors = fields(
        parse_json(data), ("format", "model", "revision", "blocks", "tensors")
    )
    integer(version, FORMAT_VERSION, FORMAT_VERSION)
    return PartFolder(
        text(model, MAX_NAME_CHARACTERS),
        text(revision, MAX_NAME_CHARACTERS),
        integer(blocks, 1, MAX_BLOCKS),
        {
            text(name, MAX_NAME_CHARACTERS): text(file, 255, r"[a-z0-9-]{1,64}\.safetensors")
            for file, names in mapping(tensors).items()
            for name in items(names, MAX_TENSORS)
        },
    )
