"""Where packed files lie: a folder for each model, revision and dtype, and in it a few files for each block.

    swarm-flash/
      org--model@0123…cdef@bfloat16/
        block-0003.records                    the records, one after the other
        block-0003.resident.safetensors       the block's other tensors
        block-0003.json                       the manifest, written last: without it, the block is not prepared
        block-0003.predictor.safetensors      a predictor that was trained for the block, see `neurons`
        block-0003.predictor.json             its digest, and that of the block that it was trained for
      .locks/
        org--model@0123…cdef@bfloat16.*       see `folder_locks`

A predictor is trained after its block was prepared, so it has an entry of its own.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from huggingface_hub import constants

from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.protocol.compression import dtype_name

FOLDER_NAME = "swarm-flash"
UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written."""

_FILE_NAME = re.compile(
    r"block-(\d{4,6})\.(records|(?:resident|predictor)\.safetensors|json|predictor\.json)(\.unfinished)?"
)


def flash_root(cache_dir: Path | None) -> Path:
    """The folder of all packed files: beside the cache of the hub, or inside the folder that the user chose for it."""
    return (Path(constants.HF_HOME) if cache_dir is None else cache_dir) / FOLDER_NAME


@dataclass(frozen=True)
class BlockFiles:
    """The paths of one block's files. None of them needs to exist."""

    folder: Path
    block: int

    @property
    def records(self) -> Path:
        return self._path("records")

    @property
    def resident(self) -> Path:
        return self._path("resident.safetensors")

    @property
    def manifest(self) -> Path:
        return self._path("json")

    @property
    def predictor(self) -> Path:
        return self._path("predictor.safetensors")

    @property
    def predictor_entry(self) -> Path:
        return self._path("predictor.json")

    def _path(self, ending: str) -> Path:
        return self.folder / f"block-{self.block:04}.{ending}"


@dataclass(frozen=True)
class PackedModel:
    """Which packed files are meant: those of one model, in one revision and one dtype.

    Attributes:
        root: the folder of all packed files, see `flash_root`.
        name: the model's name in the swarm.
        revision: of the checkpoint.
        dtype: in which the weights are stored and computed with.
        source: local folder or hub id: how the user names the model on the command line.
    """

    root: Path
    name: str
    revision: str
    dtype: torch.dtype
    source: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, root: Path) -> PackedModel:
        """The packed files of a checkpoint."""
        return cls(root, checkpoint.name, checkpoint.revision, dtype, checkpoint.source)

    @property
    def folder_name(self) -> str:
        """Different for each model, revision and dtype: no name on the hub holds `--`, and `quote` leaves no `@`."""
        name = quote(self.name.replace("/", "--"), safe="")
        return f"{name}@{quote(self.revision, safe='')}@{dtype_name(self.dtype)}"

    @property
    def folder(self) -> Path:
        return self.root / self.folder_name

    def files(self, block: int) -> BlockFiles:
        """The paths of one block's files."""
        return BlockFiles(self.folder, block)

    def prepare_command(self, block: int) -> str:
        """The command line that prepares a block."""
        parts = ["swarm", "flash", "prepare", self.source, "--blocks", f"{block}:{block + 1}"]
        parts += ["--dtype", dtype_name(self.dtype)]
        if not Path(self.source).is_dir():
            parts += ["--revision", self.revision]
        if self.root != flash_root(None):
            parts += ["--cache-dir", str(self.root.parent)]
        return shlex.join(parts)


@dataclass(frozen=True)
class PackedFile:
    """A file in a model's folder that only preparation writes.

    Attributes:
        block: that it belongs to.
        part: the end of its name, such as "records".
        finished: whether it was written completely.
    """

    path: Path
    block: int
    part: str
    finished: bool


def packed_files(folder: Path) -> list[PackedFile]:
    """All packed files in a model's folder, in order of their names; files of others are left out. Raises `OSError`."""
    found = []
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            found.append(PackedFile(path, int(match[1]), match[2], match[3] is None))
    return found
