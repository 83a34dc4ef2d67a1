"""The parts of a model that were received from other peers, on disk.

A store is a folder that `open_checkpoint` opens like any other (`part_folder`). A part gets its file name when all of
it has been verified. Until then its chunks are written to an unfinished file. Which of them have arrived is not
recorded: each is compared with its digest again, so neither a crash nor a full drive can make a wrong part look right.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swarm.common.files.atomic_file import replace_file
from swarm.common.files.folders import cache_folder, nearest_folder
from swarm.common.units import format_bytes
from swarm.errors import NotEnoughSpace, ProtocolViolation, WeightsUnavailable
from swarm.models.checkpoints.part_folder import PARTS_FILE, PartFolder, read_part_folder
from swarm.models.checkpoints.safetensors_header import encode_header
from swarm.shared_weights.json_files import MAX_FILE_BYTES, file_problem
from swarm.shared_weights.manifest import (
    CLIENT,
    DIGEST_BYTES,
    FILES,
    MAX_MANIFEST_BYTES,
    PartManifest,
    all_parts,
    chunk_digest,
    item_digest,
)

SPARE_BYTES = 64 << 20
"""Free space that is left on the drive."""

_MANIFESTS = "manifests"


class PartStore:
    """Parts of one revision of a model, in a folder. Its methods block, and may be called in several threads.

    Args:
        folder: see `PartStore.open`.
        model, revision, blocks: of the whole model.
        digests: of the parts, from where the weights are trusted to come; parts without one cannot be received.
    """

    def __init__(self, folder: Path, model: str, revision: str, blocks: int, digests: Mapping[str, str]) -> None:
        self.folder = folder
        self.model, self.revision, self.blocks = model, revision, blocks
        self.digests = {part: digest for part, digest in digests.items() if part in set(all_parts(blocks))}
        self.manifests: dict[str, PartManifest] = {}
        """Those that are known, whether the part is here or not. Others may be added in another thread."""
        self._adding = threading.Lock()

    @classmethod
    def open(cls, root: Path, model: str, revision: str, blocks: int, digests: Mapping[str, str]) -> PartStore:
        """The store of a model's revision, made if there is none.

        Args:
            root: folder of all stores, such as `default_root`.

        Raises `WeightsUnavailable` if the folder cannot be written.
        """
        store = cls(root / folder_name(model, revision), model, revision, blocks, digests)
        with store._writing():
            (store.folder / _MANIFESTS).mkdir(parents=True, exist_ok=True)
            for part in store.digests:
                store._load_manifest(part)
            store._write_parts_file()
        return store

    @property
    def held(self) -> frozenset[str]:
        """The parts that are whole and right."""
        return frozenset(part for part in list(self.manifests) if self._is_held(part))

    @property
    def weight_map(self) -> dict[str, str]:
        """For each tensor of the parts that are known, its file, whether that is here or not."""
        return {
            item.name: file_name(part)
            for part, manifest in list(self.manifests.items())
            if part != FILES
            for item in manifest.items
        }

    def missing(self, parts: Iterable[str]) -> list[str]:
        """Those of `parts` that are not held."""
        held = self.held
        return [part for part in parts if part not in held]

    def add_manifest(self, part: str, data: bytes | memoryview) -> PartManifest:
        """Note a manifest that a peer sent. Raises `ProtocolViolation` if it is not the one that is trusted.

        What is here of the part by another manifest, which was trusted before, is removed.
        """
        manifest = PartManifest.decode(part, data)
        if manifest.digest != self.digests.get(part):
            raise ProtocolViolation(f"the manifest of part {part} is not the one that the model's source has")
        with self._writing(), self._adding:
            self._keep_manifest(part, manifest)
            self.manifests[part] = manifest
            self._write_parts_file()
        return manifest

    def needed_bytes(self, parts: Iterable[str]) -> int:
        """Bytes that these parts take beyond what there is of them."""
        return sum(
            max(0, self.manifests[part].size_bytes - _allocated(self.unfinished_path(part)))
            for part in self.missing(parts)
        )

    def require_space(self, parts: Iterable[str]) -> None:
        """Raise `NotEnoughSpace` unless the drive has room for these parts."""
        needed = self.needed_bytes(parts)
        try:
            status = os.statvfs(nearest_folder(self.folder))
        except OSError as error:
            raise self._unusable(error) from None
        free = status.f_bavail * status.f_frsize
        if needed and needed + SPARE_BYTES > free:
            raise self._no_space(needed, free)

    def path(self, part: str) -> Path:
        """The file of a part that is whole; for the files, the folder itself."""
        return self.folder / file_name(part) if part != FILES else self.folder

    def unfinished_path(self, part: str) -> Path:
        """The file of a part that is being received."""
        return self.folder / f".{part}.unfinished"

    def put_files(self, data: Mapping[str, bytes]) -> None:
        """Write the model's files, which have been checked, and note that they are there."""
        with self._writing():
            for name, content in data.items():
                replace_file(self.folder / name, content)

    def _is_held(self, part: str) -> bool:
        manifest = self.manifests[part]
        try:
            if part == FILES:
                return all((self.folder / one.name).stat().st_size == one.size for one in manifest.items)
            return self.path(part).stat().st_size == len(part_header(manifest)) + manifest.size_bytes
        except OSError:
            return False

    def _load_manifest(self, part: str) -> None:
        manifest = self._kept_manifest(part)
        if manifest is not None and manifest.digest == self.digests[part]:
            self.manifests[part] = manifest

    def _kept_manifest(self, part: str) -> PartManifest | None:
        try:
            with (self.folder / _MANIFESTS / part).open("rb") as file:
                return PartManifest.decode(part, file.read(MAX_MANIFEST_BYTES + 1))
        except (OSError, ProtocolViolation):
            return None

    def _keep_manifest(self, part: str, manifest: PartManifest) -> None:
        """Write a manifest. A file of the part that is there is by the manifest that is there, so it goes first."""
        if self._kept_manifest(part) == manifest:
            return
        names = [self.path(part).name] if part != FILES else list(MAX_FILE_BYTES)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        replace_file(self.folder / _MANIFESTS / part, manifest.encoded)

    def _write_parts_file(self) -> None:
        described = PartFolder(self.model, self.revision, self.blocks, self.weight_map)
        with suppress(OSError, ValueError, RecursionError):
            if read_part_folder(self.folder) == described:
                return
        replace_file(self.folder / PARTS_FILE, described.encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an `OSError` of writing to the store into an error that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_space(self.needed_bytes(self.manifests)) from None
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> WeightsUnavailable:
        return WeightsUnavailable(
            f"the folder for weights from peers, {self.folder}, cannot be used: {error.strerror or error}. Choose a "
            "folder on a local drive with --cache-dir"
        )

    def _no_space(self, needed: int, free: int | None = None) -> NotEnoughSpace:
        there = f"has {format_bytes(free)} free" if free is not None else "is full"
        return NotEnoughSpace(
            f"the weights of {self.model} that are to be received need {format_bytes(needed)} more, and the drive of "
            f"{self.folder} {there}: remove other files, take fewer blocks, or choose another drive with --cache-dir"
        )


@dataclass(frozen=True)
class Chunk:
    """A chunk of a part: of which item, and where it lies in the part's file."""

    part: str
    item: int
    number: int
    position: int
    length: int


class UnfinishedPart:
    """A part that is being received. Keeps other processes from receiving it too, until it is finished or closed.

    What has arrived before is checked and kept. It is to be opened first. Its methods block. Those that read and write
    may run in several threads, also while it is being closed.

    Args:
        part: whose manifest the store knows.
        chunk_digests: of each of its items, already checked against the items' digests; not needed of items of one
            chunk.
    """

    def __init__(self, store: PartStore, part: str, chunk_digests: list[bytes]) -> None:
        self.part = part
        self._store = store
        self._manifest = store.manifests[part]
        self._digests = chunk_digests
        self._header = b"" if part == FILES else part_header(self._manifest)
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._is_closed = self._is_held = False

    def open(self) -> None:
        """Open the part's file; to be called once. If another process has received the part, nothing is missing.

        Raises:
            NotEnoughSpace: the drive has no room for it.
            WeightsUnavailable: the folder cannot be written, or another process receives the same part.
        """
        path = self._store.unfinished_path(self.part)
        with self._store._writing(), self._lock:
            if self._is_closed:
                return
            self._file = self._locked(path)
            try:
                self._is_held = self._store._is_held(self.part)
                if not self._is_held:
                    os.ftruncate(self._descriptor, len(self._header) + self._manifest.size_bytes)
                    _write_all(self._descriptor, self._header, 0)
            except BaseException:
                self._file.close()
                raise

    def _locked(self, path: Path) -> io.FileIO:
        """The part's file, which no other process has open. One that ended with it may have moved it meanwhile."""
        while True:
            file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):
                    return file
            except BlockingIOError:
                file.close()
                raise WeightsUnavailable(
                    f"another process receives part {self.part} of {self._store.model} into {self._store.folder}: let "
                    "it finish, or use another folder with --cache-dir"
                ) from None
            except BaseException:
                file.close()
                raise
            file.close()

    @property
    def chunks(self) -> Iterator[Chunk]:
        """All chunks of the part, in order."""
        position = len(self._header)
        for number, item in enumerate(self._manifest.items):
            for chunk in range(item.chunks):
                offset, length = item.chunk_range(chunk)
                yield Chunk(self.part, number, chunk, position + offset, length)
            position += item.size

    def missing(self) -> list[Chunk]:
        """The chunks that are not there yet, or not right."""
        if self._is_held:
            return []
        with self._store._writing():
            return [one for one in self.chunks if not self._is_there(one)]

    def write(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        """Write a chunk that a peer sent; False, and nothing is written, if it is not right.

        Raises `NotEnoughSpace` or `WeightsUnavailable` if the drive does not take it, `ValueError` after `close`.
        """
        if not self._is_right(chunk, data):
            return False
        with self._store._writing(), self._lock:
            _write_all(self._descriptor, data, chunk.position)
        return True

    def finish(self) -> None:
        """Make the part available; all its chunks were written.

        Raises `ProtocolViolation` if the files cannot be used, though they are what the manifest says.
        """
        with self._store._writing():
            unfinished = self._store.unfinished_path(self.part)
            if self._is_held:
                os.unlink(unfinished)
            elif self.part == FILES:
                self._store.put_files(self._checked_files())
                os.unlink(unfinished)
            else:
                os.fsync(self._descriptor)
                os.replace(unfinished, self._store.path(self.part))
        self.close()

    def close(self) -> None:
        """Let go of the part; what has arrived stays for the next time."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise ValueError("the part's file is not open")
        return self._file.fileno()

    def _checked_files(self) -> dict[str, bytes]:
        found, position = {}, 0
        for item in self._manifest.items:
            data = os.pread(self._descriptor, item.size, position)
            problem = file_problem(item.name, data)
            if problem:
                raise ProtocolViolation(f"{item.name[:64]} of {self._store.model} is not used: {problem}")
            found[item.name] = data
            position += item.size
        return found

    def _is_there(self, chunk: Chunk) -> bool:
        with self._lock:
            descriptor = self._descriptor
            try:
                begin = os.lseek(descriptor, chunk.position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return False  # there is no data behind this position
            if begin >= chunk.position + chunk.length:  # a hole, which need not be read
                return False
            data = os.pread(descriptor, chunk.length, chunk.position)
        return self._is_right(chunk, data)

    def _is_right(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        if len(data) != chunk.length:
            return False
        item, digest = self._manifest.items[chunk.item], chunk_digest(data)
        if item.chunks == 1:
            return item_digest(digest) == item.digest
        begin = chunk.number * DIGEST_BYTES
        return digest == self._digests[chunk.item][begin : begin + DIGEST_BYTES]


def default_root(cache_dir: Path | None = None) -> Path:
    """The folder of all stores: below `cache_dir`, or this user's cache. Raises `WeightsUnavailable`."""
    if cache_dir is not None:
        return cache_dir / "swarm-weights"
    root = cache_folder()
    if root is None:
        raise WeightsUnavailable("there is no home directory for weights from peers: give a folder with --cache-dir")
    return root / "weights"


def folder_name(model: str, revision: str) -> str:
    """The name of a store's folder: readable, and different for each model and revision."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rpartition("/")[2])[:40].strip(".-") or "model"
    digest = hashlib.sha256(f"{model}\0{revision}".encode("utf-8", "replace")).hexdigest()[:12]
    return f"{readable}-{digest}"


def file_name(part: str) -> str:
    """The name of a part's file."""
    return f"{CLIENT}.safetensors" if part == CLIENT else f"block-{int(part):05}.safetensors"


def part_header(manifest: PartManifest) -> bytes:
    """The beginning of a part's file."""
    return encode_header((item.name, item.dtype, item.shape) for item in manifest.items)


def _write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Write all of it. A drive that is getting full takes the first bytes of a write, and says so only of the rest."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


def _is_at(file: io.FileIO, path: Path) -> bool:
    """Whether a file that is open is still the one of this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _allocated(path: Path) -> int:
    """Bytes that a file takes on the drive; 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
