"""The manifest of a block's packed files: what they hold, how they lie, and the digests of their contents.

A manifest is written last, so a block that has one was written completely. It is a file, so nothing in it is believed:
its own digest finds changed bytes, what it says of the block must be what would be written now, and the sizes of the
files are compared before anything is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.common.dtypes import dtype_name
from swarm.common.files.atomic_file import read_small
from swarm.common.files.checked_json import fields, integer, items, parse_json, text, to_json
from swarm.common.units import format_bytes
from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import BlockPlan
from swarm.models.flash.files.block_files import BlockFiles, PackedModel
from swarm.models.flash.records import RecordLayout

PART_BYTES = 64 << 20
"""Bytes of a file that one digest covers, so that many threads check a large file at once and a message can say where
it is broken. The hash is SHA-256, for which processors have instructions: 1.4 GB/s a thread."""

READ_BYTES = 4 << 20
"""Bytes that a thread reads at once."""

MAX_THREADS = 8


class PartDigests:
    """The digests of a file that is being written, part by part."""

    def __init__(self) -> None:
        self._finished: list[str] = []
        self._state = hashlib.sha256()
        self._length = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while len(data):
            piece = data[: PART_BYTES - self._length]
            self._state.update(piece)
            self._length += len(piece)
            data = data[len(piece) :]
            if self._length == PART_BYTES:
                self._finish_part()

    def finish(self) -> tuple[str, ...]:
        """The digests of all parts, each 64 hexadecimal digits."""
        if self._length:
            self._finish_part()
        return tuple(self._finished)

    def _finish_part(self) -> None:
        self._finished.append(self._state.hexdigest())
        self._state = hashlib.sha256()
        self._length = 0


def number_of_parts(size: int) -> int:
    """How many digests a file of `size` bytes has."""
    return -(-size // PART_BYTES)


def verify_parts(path: Path, digests: Sequence[str], progress: Callable[[int], object] = lambda size: None) -> None:
    """Read the whole file and compare it with the digests of its parts. Memory: `READ_BYTES` a thread.

    Args:
        progress: called with the bytes of each part that was compared.

    Raises:
        PackedFileError: a part differs; the message says which.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        threads = min(MAX_THREADS, os.cpu_count() or 1, len(digests))
        with ThreadPoolExecutor(max(threads, 1), "swarm-digest") as pool:
            jobs = {pool.submit(_part_digest, file.fileno(), part): part for part in range(len(digests))}
            try:
                for job in as_completed(jobs):
                    part = jobs[job]
                    digest, size = job.result()
                    if digest != digests[part]:
                        raise PackedFileError(f"{path.name} {_place(part)} is not what was written")
                    progress(size)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _part_digest(descriptor: int, part: int) -> tuple[str, int]:
    """Digest and length of one part."""
    state, length = hashlib.sha256(), 0
    for piece in _pieces(descriptor, part * PART_BYTES):
        state.update(piece)
        length += len(piece)
    return state.hexdigest(), length


def _pieces(descriptor: int, start: int) -> Iterator[memoryview]:
    """The bytes of a part, piece by piece, in memory that is used again."""
    memory = memoryview(bytearray(READ_BYTES))
    offset, end = start, start + PART_BYTES
    while offset < end:
        count = os.preadv(descriptor, [memory[: end - offset]], offset)
        if count == 0:
            return
        yield memory[:count]
        offset += count


def _place(part: int) -> str:
    return f"(from {format_bytes(part * PART_BYTES)} on)" if part else "(at its beginning)"


FORMAT_VERSION = 1
"""Counts up with every change of the packed files. Files of another version are prepared anew."""

MAX_MANIFEST_BYTES = 4 << 20
MAX_NUMBER = 1 << 50
"""Bound of every number in a manifest: a petabyte."""

MAX_NAME_LENGTH = 4096

_SEALED = re.compile(rb'\{"sha256":"([0-9a-f]{64})","content":(.*)\}', re.DOTALL)
"""The content of a file: the SHA-256 of some JSON, and this JSON."""


@dataclass(frozen=True)
class FileContent:
    """What one file must hold: its size in bytes, and the digest of each of its parts (see `content_digests`)."""

    size: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a block's packed files hold.

    Attributes:
        format: `FORMAT_VERSION`.
        model, revision: of the checkpoint.
        block: index in the whole model.
        dtype: name of the dtype of the records.
        digest: of the block's tensors in the checkpoint, see `swarm.models.checkpoints.block_digest`.
        plan: what of the block became records.
        layout: of the records.
        records, resident: the two files.
    """

    format: int
    model: str
    revision: str
    block: int
    dtype: str
    digest: str
    plan: BlockPlan
    layout: RecordLayout
    records: FileContent
    resident: FileContent

    @classmethod
    def of(
        cls,
        model: PackedModel,
        block: int,
        digest: str,
        plan: BlockPlan,
        layout: RecordLayout,
        contents: tuple[FileContent, FileContent],
    ) -> Manifest:
        """The manifest of a block whose records and other tensors were written with these contents."""
        identity = (model.name, model.revision, block, dtype_name(model.dtype), digest)
        return cls(FORMAT_VERSION, *identity, plan, layout, *contents)

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return self.records.size + self.resident.size


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of the file of a manifest."""
    data = _json_of(manifest)
    return b'{"sha256":"%s","content":%s}' % (hashlib.sha256(data).hexdigest().encode(), data)


def _json_of(manifest: Manifest) -> bytes:
    values = asdict(manifest)
    del values["layout"]["dtype"]  # it is the manifest's
    return to_json(values)


def read_manifest(path: Path, model: PackedModel, block: int, plan: BlockPlan, layout: RecordLayout) -> Manifest:
    """Read the manifest of this block of this model, with records of this plan. Whether the files fit is checked later.

    Raises:
        FileNotFoundError: there is none.
        PackedFileError: it cannot be used, or is that of other files than would be written now.
    """
    try:
        content = _unsealed(read_small(path, MAX_MANIFEST_BYTES))
        digest, records, resident = fields(content, ("digest", "records", "resident"), closed=False)
        contents = _file_content(records), _file_content(resident)
        expected = Manifest.of(model, block, text(digest, 64, "[0-9a-f]+"), plan, layout, contents)
        _require_same(content, parse_json(_json_of(expected)))
        if layout.file_bytes != expected.records.size:
            raise ValueError("the records do not have the size of their file")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PackedFileError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # bad Unicode is a ValueError
        raise PackedFileError(f"{path.name} is not a manifest ({error})") from None
    return expected


def _require_same(content: object, expected: object) -> None:
    """Raise `PackedFileError` unless a manifest says what is expected."""
    names = ("model", "revision", "dtype", "block", "plan")
    *identity, plan = fields(content, names, closed=False)
    *wanted, wanted_plan = fields(expected, names, closed=False)
    kinds = [fields(one, ["kind"], closed=False) for one in (plan, wanted_plan)]
    if identity != wanted or kinds[0] != kinds[1]:
        name, block = _name(identity[0]), _size(identity[3])
        raise PackedFileError(f"the files are those of block {block} of {name}, or hold records of another kind")
    if content != expected:
        raise PackedFileError("it was prepared in another way than this program does it")


def _unsealed(data: bytes) -> object:
    """The JSON inside, which has the digest that the file says, and the format that this program knows."""
    sealed = _SEALED.fullmatch(data)
    if sealed is None:
        raise ValueError("it is not a digest and its content")
    if hashlib.sha256(sealed[2]).hexdigest() != sealed[1].decode():
        raise ValueError("it was changed after it was written")
    content = parse_json(sealed[2])
    (version,) = fields(content, ["format"], closed=False)
    if _size(version) != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, this program writes and reads format {FORMAT_VERSION}")
    return content


def _file_content(value: object) -> FileContent:
    size, parts = fields(value, ("size", "parts"))
    content = FileContent(_size(size), tuple(text(part, 64, "[0-9a-f]{64}") for part in items(parts)))
    if len(content.parts) != number_of_parts(content.size):
        raise ValueError("a file does not have a digest for each part")
    return content


def _name(value: object) -> str:
    return text(value, MAX_NAME_LENGTH)


def _size(value: object) -> int:
    return integer(value, 0, MAX_NUMBER)


def check_sizes(manifest: Manifest, files: BlockFiles) -> None:
    """Raise `PackedFileError` unless both files exist and have the sizes that the manifest gives."""
    for path, content in ((files.records, manifest.records), (files.resident, manifest.resident)):
        try:
            size = path.stat().st_size
        except OSError as error:
            raise PackedFileError(f"{path.name} cannot be read ({error.strerror})") from None
        if size != content.size:
            raise PackedFileError(f"{path.name} has {size} bytes instead of {content.size}")
