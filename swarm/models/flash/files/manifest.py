"""The manifest of a block's packed files: what they hold, how they lie, and the digests of their contents.

A manifest is written last, so a block that has one was written completely. It is a file, so nothing in it is believed:
its own digest finds changed bytes, and every number is compared with the others and with the sizes of the files before
anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch

from swarm.errors import PackedFileError
from swarm.models.flash.files.block_files import BlockFiles, PackedModel
from swarm.models.flash.files.content_digests import number_of_parts
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.records.record_layout import RecordField, RecordLayout
from swarm.protocol.compression import HIDDEN_DTYPES, dtype_name

FORMAT_VERSION = 1
"""Counts up with every change of the packed files. Files of another version are prepared anew."""

MAX_MANIFEST_BYTES = 4 << 20
MAX_NUMBER = 1 << 50
"""Bound of every number in a manifest: a petabyte."""

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
T = TypeVar("T")

Name = Annotated[str, msgspec.Meta(max_length=4096)]


class FileContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file must hold: its size in bytes, and the digest of each of its parts (see `content_digests`)."""

    size: Number
    parts: tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    model: Name
    revision: Name
    block: Number
    dtype: Name
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,64}$")]
    plan: _PlanEntry
    layout: _LayoutEntry
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
        return cls(FORMAT_VERSION, *identity, _PlanEntry.of(plan), _LayoutEntry.of(layout), *contents)

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return self.records.size + self.resident.size

    def block_plan(self) -> BlockPlan:
        """What of the block became records."""
        plan = self.plan
        return BlockPlan(plan.kind, dict(plan.modules), dict(plan.axes), plan.resident)

    def record_layout(self) -> RecordLayout:
        """The layout of the records. Raises `ValueError` unless all its numbers agree with each other."""
        return self.layout.checked(self.plan.axes, HIDDEN_DTYPES[self.dtype])


class PredictorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a predictor's file holds.

    Attributes:
        format: `FORMAT_VERSION`.
        digest: of the block that it was trained for.
        content: of its file.
    """

    format: int
    digest: Name
    content: FileContent


class _PlanEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: RecordKind
    modules: dict[Name, Name]
    axes: dict[Name, Number | None]
    resident: tuple[Name, ...]

    @classmethod
    def of(cls, plan: BlockPlan) -> _PlanEntry:
        return cls(plan.kind, dict(plan.modules), dict(plan.axes), tuple(plan.resident))


class _FieldEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensor: Name
    axis: Number | None
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=16)]
    offset: Number


class _LayoutEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fields: tuple[_FieldEntry, ...]
    count: Number
    record_bytes: Number
    stride: Number

    @classmethod
    def of(cls, layout: RecordLayout) -> _LayoutEntry:
        fields = tuple(_FieldEntry(one.tensor, one.axis, tuple(one.shape), one.offset) for one in layout.fields)
        return cls(fields, layout.count, layout.record_bytes, layout.stride)

    def checked(self, axes: Mapping[str, int | None], dtype: torch.dtype) -> RecordLayout:
        """The layout that tensors of these shapes have; it must be the one that the manifest describes."""
        fields = tuple(RecordField(one.tensor, one.axis, one.shape, one.offset) for one in self.fields)
        described = RecordLayout(dtype, fields, self.count, self.record_bytes, self.stride)
        shapes = {}
        for field in fields:
            if field.axis is None:
                shapes[field.tensor] = field.shape
            elif field.axis <= len(field.shape):
                shapes[field.tensor] = (*field.shape[: field.axis], self.count, *field.shape[field.axis :])
            else:
                raise ValueError(f"{field.tensor} has no axis {field.axis}")
        if {field.tensor: field.axis for field in fields} != axes or not self.count:
            raise ValueError("the layout is not that of the plan")
        if any(math.prod(shape) == 0 for shape in shapes.values()) or described.file_bytes > MAX_NUMBER:
            raise ValueError("the records are empty or too large")
        if RecordLayout.of(shapes, dict(axes), dtype) != described:
            raise ValueError("the layout's numbers contradict each other")
        return described


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the SHA-256 of some JSON, and this JSON."""

    sha256: str
    content: msgspec.Raw


class _Version(msgspec.Struct):
    format: int


_sealed_decoder = msgspec.json.Decoder(_Sealed)
_version_decoder = msgspec.json.Decoder(_Version)
_manifest_decoder = msgspec.json.Decoder(Manifest)
_predictor_decoder = msgspec.json.Decoder(PredictorEntry)


def encode_sealed(content: Manifest | PredictorEntry) -> bytes:
    """The content of the file of a manifest or an entry."""
    data = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(hashlib.sha256(data).hexdigest(), msgspec.Raw(data)))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check it in itself; whether it is the expected one, and the files fit, is checked later.

    Raises:
        FileNotFoundError: there is none.
        PackedFileError: it cannot be used.
    """
    return _read(path, _decode_manifest)


def read_predictor_entry(path: Path) -> PredictorEntry:
    """Read a predictor's entry and check it in itself.

    Raises:
        FileNotFoundError: there is none.
        PackedFileError: it cannot be used.
    """
    return _read(path, _decode_predictor_entry)


def _read(path: Path, decode: Callable[[bytes], T]) -> T:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PackedFileError(f"{path.name} cannot be read ({error.strerror})") from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise PackedFileError(f"{path.name} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    try:
        return decode(_unsealed(data))
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, as is bad Unicode
        raise PackedFileError(f"{path.name} is not a manifest ({error})") from None


def _unsealed(data: bytes) -> bytes:
    """The JSON inside, which has the digest that the file says, and the format that this program knows."""
    sealed = _sealed_decoder.decode(data)
    content = bytes(sealed.content)
    if hashlib.sha256(content).hexdigest() != sealed.sha256:
        raise ValueError("it was changed after it was written")
    version = _version_decoder.decode(content).format
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, this program writes and reads format {FORMAT_VERSION}")
    return content


def _decode_manifest(content: bytes) -> Manifest:
    manifest = _manifest_decoder.decode(content)
    if manifest.dtype not in HIDDEN_DTYPES:
        raise ValueError(f"it has the unknown dtype {manifest.dtype!r}")
    if manifest.record_layout().file_bytes != manifest.records.size:
        raise ValueError("the records do not have the size of their file")
    _check_parts(manifest.records)
    _check_parts(manifest.resident)
    return manifest


def _decode_predictor_entry(content: bytes) -> PredictorEntry:
    entry = _predictor_decoder.decode(content)
    _check_parts(entry.content)
    return entry


def _check_parts(content: FileContent) -> None:
    if len(content.parts) != number_of_parts(content.size):
        raise ValueError("a file does not have a digest for each part")


def check_identity(manifest: Manifest, model: PackedModel, block: int, kind: RecordKind) -> None:
    """Raise `PackedFileError` unless the manifest is that of this block of this model, with records of this kind."""
    expected = (model.name, model.revision, dtype_name(model.dtype), block, kind)
    found = (manifest.model, manifest.revision, manifest.dtype, manifest.block, manifest.plan.kind)
    if found != expected:
        what = f"{manifest.plan.kind}, {manifest.dtype}"
        raise PackedFileError(f"the files are those of block {manifest.block} of {manifest.model} ({what})")


def check_sizes(manifest: Manifest, files: BlockFiles) -> None:
    """Raise `PackedFileError` unless both files exist and have the sizes that the manifest gives."""
    check_size(files.records, manifest.records)
    check_size(files.resident, manifest.resident)


def check_size(path: Path, content: FileContent) -> None:
    """Raise `PackedFileError` unless the file exists and has the size that it should have."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise PackedFileError(f"{path.name} cannot be read ({error.strerror})") from None
    if size != content.size:
        raise PackedFileError(f"{path.name} has {size} bytes instead of {content.size}")
