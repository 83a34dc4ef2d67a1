"""Memory for records: slots of one layout, aligned for direct reads, seen as tensors without copying."""

from __future__ import annotations

import numpy as np
import torch

from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT, RecordLayout

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

    def addresses(self, slots: Indices) -> Indices:
        """The memory addresses of slots."""
        return self.data.data_ptr() + slots * self.layout.stride

    def copy_from(self, other: RecordBuffer, sources: Indices, targets: Indices) -> None:
        """Copy records from slots of `other`, which may be this buffer if no slot is among both.

        One by one, because an index takes memory for all of them first, whose pages cost more than the copies.
        """
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._words[target] = other._words[source]

    def move(self, sources: Indices, targets: Indices) -> None:
        """Copy records from slots to other slots; no slot is among both."""
        self.copy_from(self, sources, targets)
