"""Records: the weights that are needed together, side by side on flash and in memory.

A record is one neuron (its row of the up projection, its row of the gate, its column of the down projection: the
row-column bundle of "LLM in a flash", section 3.2), one expert, or one whole block. All records of a block have the
same layout. A `WeightStore` holds the records of one block. What computes (`neurons`, `experts`, `streaming`) owns a
`RecordBuffer`, decides which records lie in it, and has the store read the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

RECORD_ALIGNMENT = 4096
"""Bytes of which a record's place in its file is a multiple. Direct reads need this of offset, length and memory
address on every common drive; 512 would do on some."""

FIELD_ALIGNMENT = 64
"""Bytes of which a field's place in its record is a multiple: a cache line."""


@dataclass(frozen=True)
class RecordField:
    """The part of one tensor that belongs to a record.

    Attributes:
        tensor: the tensor's name inside its block, such as "mlp.up_proj.weight".
        axis: the axis of the tensor that counts records: record i holds `tensor.select(axis, i)`. None: the tensor is
            whole in the one record that there is.
        shape: of that part.
        offset: bytes from the beginning of the record.
    """

    tensor: str
    axis: int | None
    shape: tuple[int, ...]
    offset: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def parts(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor cut into records, `[records, *shape]`: a view."""
        return tensor.unsqueeze(0) if self.axis is None else tensor.movedim(self.axis, 0)


@dataclass(frozen=True)
class RecordLayout:
    """How the records of one block lie, in files and in memory.

    Attributes:
        dtype: of all values.
        fields: the parts of a record, in order.
        count: number of records.
        record_bytes: bytes of one record.
        stride: bytes from one record to the next, a multiple of `RECORD_ALIGNMENT`.
    """

    dtype: torch.dtype
    fields: tuple[RecordField, ...]
    count: int
    record_bytes: int
    stride: int

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int | None], dtype: torch.dtype
    ) -> RecordLayout:
        """The layout for tensors of these shapes, cut along these axes (None: whole, in one record).

        Raises `ValueError` if the tensors do not have the same number of records, or if there are none.
        """
        counts = {1 if axis is None else shapes[name][axis] for name, axis in axes.items()}
        if len(counts) != 1:
            raise ValueError(f"the tensors {', '.join(axes)} hold {sorted(counts)} records; they need the same number")
        fields, offset = [], 0
        for name, axis in axes.items():
            shape = shapes[name] if axis is None else shapes[name][:axis] + shapes[name][axis + 1 :]
            field = RecordField(name, axis, shape, offset)
            fields.append(field)
            offset = _round_up(offset + field.values * dtype.itemsize, FIELD_ALIGNMENT)
        last = fields[-1]
        record_bytes = last.offset + last.values * dtype.itemsize
        return cls(dtype, tuple(fields), counts.pop(), record_bytes, _round_up(record_bytes, RECORD_ALIGNMENT))

    @property
    def file_bytes(self) -> int:
        """Bytes of all records."""
        return self.count * self.stride

    def field(self, tensor: str) -> RecordField:
        """The field that holds parts of this tensor. Raises `KeyError`."""
        for field in self.fields:
            if field.tensor == tensor:
                return field
        raise KeyError(tensor)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Indices = np.ndarray
"""Numbers of records or slots: one dimension, `int64`."""


HUGE_PAGE_BYTES = 2 << 20
"""A huge page of x86 and of most ARM systems."""


def allocate_aligned(size: int) -> torch.Tensor:
    """`[size]` uint8 at an address that is a multiple of `RECORD_ALIGNMENT`, in huge pages where Linux provides them.

    A drive reads into huge pages at up to 2.5 times the speed: scattered small pages cost it an entry each.
    """
    alignment = HUGE_PAGE_BYTES if size >= 2 * HUGE_PAGE_BYTES else RECORD_ALIGNMENT
    memory = torch.from_numpy(np.empty(size + alignment, dtype=np.uint8))  # numpy asks for huge pages
    start = -memory.data_ptr() % alignment
    return memory[start : start + size]


class RecordBuffer:
    """Room for `slots` records. Pages that were never written take no memory.

    Args:
        memory: from `allocate_aligned`, large enough, for buffers of different layouts that take turns; None for
            memory of its own.

    Attributes:
        layout: of the records.
        slots: number of records that it has room for.
        data: `[slots, layout.stride]` uint8; its address is a multiple of `RECORD_ALIGNMENT`.
    """

    def __init__(self, layout: RecordLayout, slots: int, memory: torch.Tensor | None = None) -> None:
        self.layout = layout
        self.slots = slots
        memory = allocate_aligned(self.nbytes) if memory is None else memory
        self.data = memory[: self.nbytes].view(slots, layout.stride)
        self._values = self.data.view(layout.dtype)
        self._words = self.data.numpy().view(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.layout.stride

    def field(self, tensor: str) -> torch.Tensor:
        """A field of all records, `[slots, *field.shape]`: a view, strided by record."""
        field = self.layout.field(tensor)
        start = field.offset // self.layout.dtype.itemsize
        values = self._values[:, start : start + field.values]
        return values.view(self.slots, *(field.shape or (1,)))

    def copy_from(self, other: RecordBuffer, sources: Indices, targets: Indices) -> None:
        """Copy records from slots of `other`, which may be this buffer if no slot is among both.

        One by one, because an index takes memory for all of them first, whose pages cost more than the copies.
        """
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._words[target] = other._words[source]

    def move(self, sources: Indices, targets: Indices) -> None:
        """Copy records from slots to other slots; no slot is among both."""
        self.copy_from(self, sources, targets)


class PendingRead(Protocol):
    """Records on their way into a buffer."""

    def wait(self) -> None:
        """Wait until all have arrived. Raises `DriveFailed` if some cannot be read, or take too long."""


@dataclass
class StoreCounters:
    """What a store did since it was opened.

    Attributes:
        records: records read.
        bytes: bytes read, padding and gaps included.
        reads: operations of the drive; neighboring records need one.
        wait_seconds: time that computing stood still in `PendingRead.wait`.
    """

    records: int = 0
    bytes: int = 0
    reads: int = 0
    wait_seconds: float = 0.0


class WeightStore(Protocol):
    """Holds the records of one block, and reads them into memory on request.

    Used by one thread at a time.

    Attributes:
        layout: of the records.
        counters: what was read.
    """

    layout: RecordLayout
    counters: StoreCounters

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        """Begin to read `records[i]` into `slots[i]` of `buffer`.

        The slots must not be used before the returned read was waited for. Records that lie side by side in the file
        and go to neighboring slots are read as one. Raises `DriveFailed`.
        """

    def close(self) -> None:
        """Let go of files. Reads that are pending are waited for."""


class FinishedRead:
    """A read that is over."""

    def wait(self) -> None:
        """Return at once."""
