"""What a record is: the weights that are needed together, side by side on flash and in memory.

A record is one neuron (its row of the up projection, its row of the gate, its column of the down projection: the
row-column bundle of "LLM in a flash", section 3.2), one expert, or one whole block. All records of a block have the
same layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
