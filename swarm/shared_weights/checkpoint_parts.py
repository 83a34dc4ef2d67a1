"""The parts of a checkpoint on this machine: their manifests, and any chunk of them.

The digests are computed once: they are kept beside the sizes and times of the files that they were read from. A
checkpoint that is on this machine in part has the parts whose files are all here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.common.files.atomic_file import replace_file
from swarm.common.files.folders import cache_folder
from swarm.errors import CheckpointError
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.safetensors_header import StoredTensor, read_header
from swarm.shared_weights.json_files import offered_files
from swarm.shared_weights.manifest import (
    CHUNK_BYTES,
    CLIENT,
    DIGEST_BYTES,
    FILES,
    Item,
    ModelManifest,
    PartManifest,
    all_parts,
    chunk_digest,
    item_digest,
)

Stamp = tuple[str, int, int]
"""A file's path, size in bytes and time of change in ns: as long as they stay, so do the digests."""

OnHashed = Callable[[int], object]
"""Called with the number of bytes that have just been hashed."""

MAX_KEPT_BYTES = 64 << 20


class _KeptPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is kept of a part: the files that it was read from, its items, and the digests of their chunks."""

    stamps: tuple[Stamp, ...]
    items: tuple[Item, ...]
    chunk_digests: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=1 << 14)]


_kept_decoder = msgspec.msgpack.Decoder(_KeptPart)


class CheckpointParts:
    """The parts of a checkpoint that are on this machine. Its methods block, and may be called in several threads.

    Args:
        checkpoint: nothing of it is downloaded.
        kept_in: folder for digests that were computed; None to keep none.

    Raises `CheckpointError` if the checkpoint is in GGUF.
    """

    def __init__(self, checkpoint: Checkpoint, kept_in: Path | None = None) -> None:
        if checkpoint.gguf is not None:
            raise CheckpointError(
                f"the weights of {checkpoint.name} are in GGUF, in which peers do not give each other weights. Give "
                "each peer the file, or use the model's checkpoint in safetensors"
            )
        self.checkpoint = checkpoint
        self._folder = kept_in / _folder_name(checkpoint) if kept_in is not None else None
        self._known: dict[str, _KeptPart] = {}
        self._manifests: dict[str, PartManifest] = {}
        self._lock = threading.Lock()
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointParts:
        """The parts of a checkpoint, with digests kept in this user's cache."""
        root = cache_folder()
        return cls(checkpoint, root / "manifests" if root is not None else None)

    @cached_property
    def held(self) -> tuple[str, ...]:
        """The parts that are whole on this machine."""
        names = self._tensor_names
        here = {file for file in set(self.checkpoint.weight_map.values()) if self.checkpoint.cached(file) is not None}

        def is_whole(part: str) -> bool:
            if part == FILES:
                return True
            tensors = names.get(part, ())
            return bool(tensors) and all(self.checkpoint.weight_map[name] in here for name in tensors)

        return tuple(part for part in all_parts(self.checkpoint.blocks) if is_whole(part))

    @property
    def known_digests(self) -> dict[str, str]:
        """The digests of the parts whose manifests were asked for before."""
        return {part: self.manifest(part).digest for part in list(self._known)}

    def size_bytes(self, parts: Iterable[str]) -> int:
        """Bytes of these parts, which are on this machine. Reads headers only."""
        return sum(size for part in parts for size in self._sizes(part))

    def manifest(self, part: str, on_hashed: OnHashed = lambda size: None) -> PartManifest:
        """A part's manifest, which takes time the first time: all of it is read. Raises `CheckpointError`."""
        found = self._manifests.get(part)
        if found is None:  # its digest is computed once, too
            found = self._manifests.setdefault(part, PartManifest(self._part(part, on_hashed).items))
        return found

    def manifests(self, parts: Iterable[str] | None = None, on_hashed: OnHashed = lambda size: None) -> ModelManifest:
        """The manifests of these parts, by default of all that are held. Raises `CheckpointError`."""
        found = {part: self.manifest(part, on_hashed) for part in (self.held if parts is None else parts)}
        one = self.checkpoint
        return ModelManifest(one.name, one.revision, one.blocks, found)

    def chunk_digests(self, part: str) -> bytes:
        """The digests of the chunks of all items that have several, one behind the other. Raises `CheckpointError`."""
        kept = self._part(part, lambda size: None)
        return b"".join(one for item, one in zip(kept.items, kept.chunk_digests, strict=True) if item.chunks > 1)

    def read(self, part: str, item: int, chunk: int) -> bytes:
        """One chunk of a part. Raises `CheckpointError` if its files have changed since, or cannot be read."""
        kept = self._part(part, lambda size: None)
        if part != FILES and _have_changed(kept.stamps):
            raise CheckpointError(f"the weights of part {part} have changed since their digests were computed")
        one = kept.items[item]
        offset, length = one.chunk_range(chunk)
        return self._read(part, one.name, offset, length)

    def _part(self, part: str, on_hashed: OnHashed) -> _KeptPart:
        found = self._known.get(part)
        if found is None:
            with self._lock:
                found = self._known.get(part)
                if found is None:
                    found = self._load(part) or self._compute(part, on_hashed)
                    self._known[part] = found
        return found

    def _compute(self, part: str, on_hashed: OnHashed) -> _KeptPart:
        stamps = self._stamps(part)  # before reading: files that change meanwhile are read again next time
        items, digests = [], []
        for name, dtype, shape, size in self._forms(part):
            found = bytearray()
            for offset in range(0, size, CHUNK_BYTES):
                data = self._read(part, name, offset, min(CHUNK_BYTES, size - offset))
                found += chunk_digest(data)
                on_hashed(len(data))
            items.append(Item(name, dtype, shape, size, item_digest(found)))
            digests.append(bytes(found))
        computed = _KeptPart(stamps, tuple(items), tuple(digests))
        if self._folder is not None:
            with suppress(OSError):  # it is computed again next time
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(self._folder / part, msgspec.msgpack.encode(computed))
        return computed

    def _load(self, part: str) -> _KeptPart | None:
        """What was computed before, if the files have not changed since."""
        if self._folder is None:
            return None
        try:
            with (self._folder / part).open("rb") as file:
                kept = _kept_decoder.decode(file.read(MAX_KEPT_BYTES))
        except (OSError, msgspec.MsgspecError):
            return None
        sizes = [item.chunks * DIGEST_BYTES for item in kept.items]
        if kept.stamps != self._stamps(part) or sizes != [len(one) for one in kept.chunk_digests]:
            return None
        return kept

    def _forms(self, part: str) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype, shape and size of each item."""
        if part == FILES:
            for name, data in sorted(self._files.items()):
                yield name, "", (), len(data)
            return
        for name in self._tensor_names[part]:
            stored = self._stored(name)
            yield name, stored.dtype, stored.shape, stored.size_bytes

    def _sizes(self, part: str) -> list[int]:
        return [size for _, _, _, size in self._forms(part)]

    def _stamps(self, part: str) -> tuple[Stamp, ...]:
        if part == FILES:  # small, and changed where they are read, so their content is what counts
            return tuple((name, len(one), _number(one)) for name, one in sorted(self._files.items()))
        files = sorted({self.checkpoint.weight_map[name] for name in self._tensor_names[part]})
        try:
            return tuple(_stamp(self._path(file)) for file in files)
        except OSError as error:
            raise CheckpointError(f"{self.checkpoint.source} cannot be read: {error.strerror}") from None

    def _read(self, part: str, name: str, offset: int, length: int) -> bytes:
        if part == FILES:
            return self._files[name][offset : offset + length]
        stored = self._stored(name)
        path = self._path(self.checkpoint.weight_map[name])
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), length, stored.offset + offset)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if len(data) != length:
            raise CheckpointError(f"{path} is shorter than its header says")
        return data

    def _stored(self, name: str) -> StoredTensor:
        file = self.checkpoint.weight_map[name]
        if file not in self._headers:
            self._headers[file] = dict(read_header(self._path(file)))
        found = self._headers[file].get(name)
        if found is None:
            raise CheckpointError(f"{file} does not hold the tensor {name[:200]}, although the index says so")
        return found

    def _path(self, file: str) -> Path:
        path = self.checkpoint.cached(file)
        if path is None:
            raise CheckpointError(f"{file} of {self.checkpoint.source} is not on this machine")
        return path

    @cached_property
    def _files(self) -> dict[str, bytes]:
        return offered_files(self.checkpoint)

    @cached_property
    def _tensor_names(self) -> dict[str, list[str]]:
        """The names of each part's tensors, in order. Tensors of neither blocks nor the client's part do not travel."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.checkpoint.weight_map):
            place = self.checkpoint.locate(name)
            if place is not None:
                found.setdefault(str(place[0]), []).append(name)
            elif self.checkpoint.is_client_tensor(name):
                found.setdefault(CLIENT, []).append(name)
        return found


def _folder_name(checkpoint: Checkpoint) -> str:
    source = checkpoint.source
    if os.path.isdir(source):  # a model of the hub has the same name in whatever folder this process runs
        source = os.path.abspath(source)
    where = f"{source}\0{checkpoint.revision}"
    return hashlib.sha256(where.encode("utf-8", "replace")).hexdigest()[:32]


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


def _have_changed(stamps: tuple[Stamp, ...]) -> bool:
    """Whether one of these files is another one now. One that cannot be looked at is not: reading it says why."""
    for stamp in stamps:
        with suppress(OSError):
            if _stamp(Path(stamp[0])) != stamp:
                return True
    return False


def _number(data: bytes) -> int:
    return int.from_bytes(chunk_digest(data)[:7], "little")
