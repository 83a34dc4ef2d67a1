"""A forward with all neurons of a block, read in order in slabs: one is computed while the next is read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing

import numpy as np
import torch

from swarm.models.flash.neurons.neuron_counters import NeuronCounters
from swarm.models.flash.neurons.neuron_matrix import NeuronMatrix
from swarm.models.flash.neurons.neuron_products import NeuronProducts
from swarm.models.flash.records.record_buffer import Indices, RecordBuffer, allocate_aligned
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.models.flash.records.weight_store import FinishedRead, PendingRead, StoreCounters, WeightStore

SLAB_BYTES = 8 << 20
"""Bytes that are read at once: drives gain nothing from more."""


class SlabMemory:
    """Two slabs, shared by all blocks of a span, which are computed one after the other.

    Args:
        size: bytes of a slab; at least a record.
    """

    def __init__(self, size: int = SLAB_BYTES) -> None:
        self.size = size
        self._halves = (allocate_aligned(size), allocate_aligned(size))

    @property
    def nbytes(self) -> int:
        return 2 * self.size

    def buffers(self, layout: RecordLayout) -> tuple[RecordBuffer, RecordBuffer]:
        """Both as buffers of this layout. What was in them is lost."""
        slots = self.size // layout.stride
        first, second = (RecordBuffer(layout, slots, memory) for memory in self._halves)
        return first, second


class ExactPass:
    """Computes one block's feed-forward layer with all of its neurons.

    Args:
        biases: by role, of all neurons.
        store: holds the block's records.
    """

    def __init__(
        self, products: NeuronProducts, biases: Mapping[str, torch.Tensor], store: WeightStore, memory: SlabMemory
    ) -> None:
        self._products, self._biases, self._store, self._memory = products, biases, store, memory

    def compute(
        self,
        hidden_TH: torch.Tensor,
        selected_SN: torch.Tensor,
        joining: Indices,
        matrix: NeuronMatrix,
        counters: NeuronCounters,
    ) -> torch.Tensor:
        """The layer's result, `[tokens, hidden]`.

        Args:
            selected_SN: what the predictor selects for the last tokens, with which recall is sampled.
            joining: neurons, sorted, that come into `matrix` on the way, which has room for them.

        Raises `DriveFailed`; what has come into the matrix by then is right.
        """
        # Sums of many slabs, so in fp32.
        result_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32)
        sampled = len(selected_SN)
        with closing(self._slabs()) as slabs:
            for start, end, buffer in slabs:
                biases = {role: bias[start:end] for role, bias in self._biases.items()}
                rows = self._products.rows(buffer, biases).first(end - start)
                values_TN = self._products.all_neurons(hidden_TH, rows)
                result_TH += values_TN @ rows.down
                counters.count_sample(selected_SN[:, start:end], values_TN[-sampled:])
                here = joining[np.searchsorted(joining, start) : np.searchsorted(joining, end)]
                matrix.append(here, _Slab(buffer, start)).wait()
        counters.exact_tokens += len(hidden_TH)
        return self._products.with_bias(result_TH.to(hidden_TH.dtype))

    def _slabs(self) -> Generator[tuple[int, int, RecordBuffer]]:
        """The first neuron of each slab, the one behind its last, and where they are, until the next is asked for."""
        count = self._store.layout.count
        buffers = self._memory.buffers(self._store.layout)
        size = buffers[0].slots
        pending: PendingRead | None = None
        try:
            pending = self._begin(0, buffers[0])
            for number, start in enumerate(range(0, count, size)):
                arrived, pending, end = pending, None, min(start + size, count)
                assert arrived is not None
                arrived.wait()
                if end < count:
                    pending = self._begin(end, buffers[(number + 1) % 2])
                yield start, end, buffers[number % 2]
        finally:
            if pending is not None:
                pending.wait()  # nothing is read into memory that others use

    def _begin(self, start: int, buffer: RecordBuffer) -> PendingRead:
        records = np.arange(start, min(start + buffer.slots, self._store.layout.count))
        return self._store.read(records, buffer, records - start)


class _Slab:
    """A slab as a store: its neurons are copied from memory."""

    def __init__(self, buffer: RecordBuffer, start: int) -> None:
        self.layout = buffer.layout
        self.counters = StoreCounters()
        self._buffer, self._start = buffer, start

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        buffer.copy_from(self._buffer, records - self._start, slots)
        return FinishedRead()

    def close(self) -> None:
        """There is nothing to let go of."""
