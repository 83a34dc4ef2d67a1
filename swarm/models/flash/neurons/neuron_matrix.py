"""The neurons of one block that are in memory: a preallocated matrix without holes.

"LLM in a flash", section 3.3. Neurons that leave are replaced by the last rows, and new ones are read in behind the
last row, so an update costs what changed and not what is there. The paper's fields are `pointer`, `bias` (`values`
here, since a gate has one too) and `num_used`; what `last_k_active` is for is decided by `active_window`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from swarm.models.flash.records import Indices, PendingRead, RecordBuffer, RecordLayout, WeightStore

ABSENT = -1
"""The row of a neuron that is not in memory."""


class NeuronMatrix:
    """Rows of neurons, in any order, `num_used` of them without a hole.

    Args:
        layout: of the records; a record is one neuron.
        capacity: rows that there is memory for.
        values: other values of each neuron that stay in memory, such as biases: name to `[neurons]`.

    Attributes:
        buffer: the rows; those before `num_used` hold neurons.
        pointer: `[capacity]` int64: which neuron is in each row.
        row_of: `[neurons]` int64: the row of each neuron, or `ABSENT`.
        num_used: rows in use. Rows of a read that is pending are in use.
    """

    def __init__(self, layout: RecordLayout, capacity: int, values: Mapping[str, torch.Tensor]) -> None:
        self.buffer = RecordBuffer(layout, capacity)
        self.pointer: Indices = np.full(capacity, ABSENT)
        self.row_of: Indices = np.full(layout.count, ABSENT)
        self.num_used = 0
        self._all_values = dict(values)
        self._row_values = {name: value.new_zeros(capacity) for name, value in values.items()}

    @property
    def capacity(self) -> int:
        return self.buffer.slots

    @property
    def neurons(self) -> Indices:
        """The neurons in memory, by row."""
        return self.pointer[: self.num_used]

    def values(self, name: str) -> torch.Tensor:
        """The values of this name by row, `[capacity]`: the paper's `bias`."""
        return self._row_values[name]

    def delete(self, neurons: Indices) -> None:
        """Let go of neurons that are in memory, each once: the last rows move into their places."""
        rows = self.row_of[neurons]
        remaining = self.num_used - len(rows)
        self.row_of[neurons] = ABSENT
        last_rows = np.arange(remaining, self.num_used)
        sources = last_rows[self.row_of[self.pointer[last_rows]] != ABSENT]
        holes = rows[rows < remaining]
        self.buffer.move(sources, holes)
        self._place(self.pointer[sources], holes)
        self.pointer[remaining : self.num_used] = ABSENT
        self.num_used = remaining

    def append(self, neurons: Indices, store: WeightStore) -> PendingRead:
        """Begin to read neurons that are not in memory, each once, into the rows from `num_used` on.

        Sorted neurons are read fastest. Nothing may be deleted before the read was waited for. If the read fails, the
        caller deletes the neurons.

        Raises `DriveFailed`; the matrix is as before then.
        """
        rows = np.arange(self.num_used, self.num_used + len(neurons))
        pending = store.read(neurons, self.buffer, rows)
        self.num_used += len(neurons)
        self._place(neurons, rows)
        return pending

    def _place(self, neurons: Indices, rows: Indices) -> None:
        self.pointer[rows] = neurons
        self.row_of[neurons] = rows
        for name, value in self._all_values.items():
            self._row_values[name][torch.from_numpy(rows)] = value[torch.from_numpy(neurons)]
