"""What packed files lie in a folder, of which models, and removing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import PackedFileError
from swarm.models.flash.files.block_files import (
    LOCKS_FOLDER,
    PackedFile,
    last_used,
    packed_files,
    removal_lock,
    unusable_folder,
)
from swarm.models.flash.files.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class StoredKind:
    """The packed files of one model with records of one kind.

    Attributes:
        kind: as the files' names say; another program may have other kinds, or none.
        blocks: the finished blocks.
        size: bytes of all files, also of unfinished ones.
    """

    kind: str
    blocks: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class StoredModel:
    """The packed files of one model, revision and dtype.

    Attributes:
        folder: where they lie.
        name, revision, dtype: as their manifests say.
        kinds: what lies there, by kind.
        last_used: seconds since 1970, or None if never.
    """

    folder: Path
    name: str
    revision: str
    dtype: str
    kinds: tuple[StoredKind, ...]
    last_used: float | None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(stored.size for stored in self.kinds)


def stored_models(root: Path) -> list[StoredModel]:
    """All models with packed files under `root`, by name; manifests are read, records are not.

    Raises `PackedFileError` if the folder cannot be read.
    """
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name != LOCKS_FOLDER)
        found = [stored for folder in folders if (stored := _stored_model(root, folder)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unusable_folder(root, error) from None
    return sorted(found, key=lambda stored: (stored.name, stored.revision, stored.dtype))


def remove_stored(stored: StoredModel) -> None:
    """Remove all packed files of a model. Files of others in its folder stay, and then so does the folder.

    Raises `PackedFileError` if a process uses or prepares them, or if they cannot be removed.
    """
    root = stored.folder.parent
    with removal_lock(root, stored.folder.name) as free:
        if not free:
            raise PackedFileError(
                f"the packed weights of {stored.name} ({stored.dtype}) are in use: stop the servers that use them, "
                "or let their preparation end"
            )
        try:
            # Manifests first: whatever is left if this is interrupted is not taken for finished.
            for file in sorted(packed_files(stored.folder), key=lambda file: file.part != "json"):
                file.path.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                stored.folder.rmdir()
        except OSError as error:
            raise unusable_folder(root, error) from None


def _stored_model(root: Path, folder: Path) -> StoredModel | None:
    """The model whose packed files lie in this folder; None if none do. Raises `OSError`."""
    try:
        files = packed_files(folder)
    except FileNotFoundError:  # another process has just removed them
        return None
    if not files:
        return None
    manifests = list(_manifests(files))
    named = manifests[0] if manifests else None
    kinds = sorted({file.kind for file in files})
    return StoredModel(
        folder=folder,
        name=named.model if named else folder.name,
        revision=named.revision if named else "",
        dtype=named.dtype if named else "",
        kinds=tuple(_stored_kind(kind, files, manifests) for kind in kinds),
        last_used=last_used(root, folder.name),
    )


def _stored_kind(kind: str, files: list[PackedFile], manifests: list[Manifest]) -> StoredKind:
    blocks = tuple(sorted(manifest.block for manifest in manifests if manifest.plan.kind == kind))
    return StoredKind(kind, blocks, sum(file.size() for file in files if file.kind == kind))


def _manifests(files: list[PackedFile]) -> Iterator[Manifest]:
    """The manifests that can be read and have the kind that their name says."""
    for file in files:
        if file.part == "json" and file.finished:
            with suppress(PackedFileError, FileNotFoundError):
                manifest = read_manifest(file.path)
                if manifest.plan.kind == file.kind:
                    yield manifest
