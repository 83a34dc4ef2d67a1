"""The header of a GGUF file: what it says of the model, and where each tensor lies. Imports no torch.

transformers reads GGUF too, but takes every count and length as it is written. Here each is compared with what is left
of the header, whose size is bounded, before anything is made by it.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import CheckpointError

SUFFIX = ".gguf"
ARCHITECTURE = "general.architecture"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
"""The largest vocabularies, with their merges, take twenty megabytes."""

MAX_ENTRIES = 1 << 16
"""Of metadata, and of tensors."""

MAX_ARRAY = 1 << 22
MAX_KEPT = 4096
"""Numbers of an array that are kept: some have one for each layer."""

MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 48
MAX_ALIGNMENT = 1 << 16

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """What a header says of a tensor: GGUF's number of its type, the shape in torch's order, and where in its file it
    begins."""

    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """A file's metadata and tensors, and a digest of the header. A long array, or one of texts, is its length."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    digest: bytes


def read_header(path: Path) -> GgufHeader:
    """Read a file's header. Raises `CheckpointError` if it is no GGUF file, or its header is cut or absurd."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError) as error:  # an undecodable text is a ValueError too
        raise CheckpointError(
            f"{path.name} is not a GGUF file that can be read: {error}. Download it again, from a source that you trust"
        ) from error


def model_name(path: Path) -> str:
    """The file's name without its ending and, if the model is split, without the number of the file."""
    split = _SPLIT.fullmatch(path.name)
    return split[1] if split else path.stem


def split_files(path: Path) -> list[Path]:
    """All files of the model of which `path` is one, in order. Raises `CheckpointError` if one is missing."""
    split = _SPLIT.fullmatch(path.name)
    if split is None or not 1 <= int(split[2]) <= int(split[3]):
        return [path]
    files = []
    for number in range(1, int(split[3]) + 1):
        files.append(path.with_name(f"{split[1]}-{number:05}-of-{split[3]}{SUFFIX}"))
        if not files[-1].is_file():
            raise CheckpointError(f"{files[-1].name} is missing beside {path.name}. Download all files of the model")
    return files


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder, the first if it is split; None if it has none. Raises `CheckpointError` if several
    models are there. Projectors, which turn images into embeddings, are none."""
    found = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file() and not path.name.startswith("mmproj"))
    if len({model_name(path) for path in found}) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise CheckpointError(f"{folder} holds several models in GGUF: {names}. Give the path of one of them")
    return found[0] if found else None


class _Reader:
    """Takes one thing after the other from the beginning of a file. Its methods raise `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin as one")
        version, tensors, entries = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are read")
        if max(tensors, entries) > MAX_ENTRIES:
            raise ValueError(f"it has {tensors} tensors and {entries} entries, of which {MAX_ENTRIES} are allowed")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text(MAX_NAME_BYTES)
            if key in metadata:
                raise ValueError(f"it has {key} twice")
            metadata[key] = self._value(self._numbers("I")[0])
        described = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError("its tensors are aligned to no number of bytes")
        start = -(-self._at // alignment) * alignment
        found = {name: GgufTensor(kind, shape, start + offset) for name, kind, shape, offset in described}
        if len(found) != tensors:
            raise ValueError("it has two tensors of one name")
        return GgufHeader(metadata, found, hashlib.sha256(self._data[: self._at]).digest())

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text(MAX_NAME_BYTES)
        (count,) = self._numbers("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {count} dimensions")
        shape = self._numbers(f"{count}Q")[::-1]  # the last one comes first
        if not all(1 <= one <= MAX_DIMENSION for one in shape):
            raise ValueError(f"{name} has the shape {list(shape)}")
        kind, offset = self._numbers("IQ")
        return name, kind, shape, offset

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self._text(MAX_HEADER_BYTES)
        if kind != _ARRAY:
            raise ValueError(f"it has a value of the unknown type {kind}")
        inner, count = self._numbers("IQ")
        if count > MAX_ARRAY:
            raise ValueError(f"it has an array of {count} entries, of which {MAX_ARRAY} are allowed")
        if inner in _NUMBERS:
            found = list(self._numbers(f"{count}{_NUMBERS[inner]}"))
            return found if count <= MAX_KEPT else count
        if inner != _TEXT:
            raise ValueError(f"it has an array of the type {inner}")
        for _ in range(count):
            self._bytes(self._numbers("Q")[0])
        return count  # as transformers has it, which takes the size of the vocabulary from it

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        form = "<" + kinds
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _text(self, limit: int) -> str:
        (length,) = self._numbers("Q")
        if length > limit:
            raise ValueError(f"it has a text of {length} bytes")
        return self._bytes(length).decode()

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > min(len(self._data), MAX_HEADER_BYTES):
            raise ValueError(f"its header is cut, or longer than {MAX_HEADER_BYTES} bytes")
        found, self._at = self._data[self._at : end], end
        return found
