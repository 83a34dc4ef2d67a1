"""Where packed files lie: a folder for each model, revision and dtype, and in it a few files for each block.

    swarm-flash/
      org--model@0123…cdef@bfloat16/
        block-0003.neurons.records                 the records, one after the other
        block-0003.neurons.resident.safetensors    the block's other tensors
        block-0003.neurons.json                    the manifest, written last: without it, the block is not prepared
        block-0003.neurons.predictor.safetensors   a predictor that was trained for the block, see `neurons`
        block-0003.block.records                   the same block for a server that is exact, and so on
      .locks/
        org--model@0123…cdef@bfloat16.*       see `preparation_lock`

The kind of record is part of the name: servers that select neurons and servers that stream whole blocks use the same
folder at the same time. A predictor is trained after its block was prepared, so its file says for which weights it is.
"""

from __future__ import annotations

import fcntl
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from huggingface_hub import constants

from swarm.common.dtypes import dtype_name
from swarm.errors import PackedFileError
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.block_plan import RecordKind

FOLDER_NAME = "swarm-flash"
UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written."""

_FILE_NAME = re.compile(
    r"block-(\d{4,6})\.(?:([a-z]+)\.)??(records|(?:resident|predictor)\.safetensors|json)(\.unfinished)?"
)


def flash_root(cache_dir: Path | None) -> Path:
    """The folder of all packed files: beside the cache of the hub, or inside the folder that the user chose for it."""
    return (Path(constants.HF_HOME) if cache_dir is None else cache_dir) / FOLDER_NAME


@dataclass(frozen=True)
class BlockFiles:
    """The paths of one block's files, with records of one kind. None of them needs to exist."""

    folder: Path
    block: int
    kind: RecordKind

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

    def _path(self, ending: str) -> Path:
        return self.folder / f"block-{self.block:04}.{self.kind}.{ending}"


@dataclass(frozen=True)
class PackedModel:
    """Which packed files are meant: those of one model, in one revision and one dtype.

    Attributes:
        root: the folder of all packed files, see `flash_root`.
        name: the model's name in the swarm.
        revision: of the checkpoint.
        dtype: in which the weights are stored and computed with.
    """

    root: Path
    name: str
    revision: str
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, root: Path) -> PackedModel:
        """The packed files of a checkpoint."""
        return cls(root, checkpoint.name, checkpoint.revision, dtype)

    @property
    def folder_name(self) -> str:
        """Different for each model, revision and dtype: no name on the hub holds `--`, and `quote` leaves no `@`."""
        name = quote(self.name.replace("/", "--"), safe="")
        return f"{name}@{quote(self.revision, safe='')}@{dtype_name(self.dtype)}"

    @property
    def folder(self) -> Path:
        return self.root / self.folder_name

    def files(self, block: int, kind: RecordKind) -> BlockFiles:
        """The paths of one block's files."""
        return BlockFiles(self.folder, block, kind)


@dataclass(frozen=True)
class PackedFile:
    """A file in a model's folder that only preparation writes.

    Attributes:
        block: that it belongs to.
        kind: of the records, as its name says. Another program may have other kinds, or none.
        part: the end of its name, such as "records".
        finished: whether it was written completely.
    """

    path: Path
    block: int
    kind: str
    part: str
    finished: bool

    def size(self) -> int:
        """Bytes; 0 if another process has just removed or renamed the file. Raises `OSError`."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


def packed_files(folder: Path) -> list[PackedFile]:
    """All packed files in a model's folder, in order of their names; files of others are left out. Raises `OSError`."""
    found = []
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            found.append(PackedFile(path, int(match[1]), match[2] or "", match[3], match[4] is None))
    return found


logger = logging.getLogger(__name__)

# Locks lie outside of the models' folders, because a lock on a removed file protects nothing.
LOCKS_FOLDER = ".locks"


@contextmanager
def preparation_lock(model: PackedModel) -> Iterator[None]:
    """Keep other processes from preparing blocks of this model. Waits, with a message, until it is their turn.

    Raises `PackedFileError` if the folder cannot be written, or if its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            (model.root / LOCKS_FOLDER).mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((model.root / LOCKS_FOLDER / f"{model.folder_name}.preparing").open("wb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Another process is preparing blocks of %s: waiting until it has finished", model.name)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise unusable_folder(model.root, error) from None
        yield


def unusable_folder(root: Path, error: OSError) -> PackedFileError:
    """The error for a folder that cannot be written or locked."""
    return PackedFileError(
        f"the folder for packed weights, {root}, cannot be used ({error.strerror or error}); "
        "choose a folder on a local drive with --cache-dir"
    )
