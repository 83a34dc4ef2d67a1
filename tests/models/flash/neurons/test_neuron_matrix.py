from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.flash.neurons.neuron_matrix import ABSENT, NeuronMatrix
from swarm.models.flash.records import RecordLayout

NEURONS, HIDDEN, CAPACITY = 24, 5, 12
AXES = {"up": 0, "down": 1}
TENSORS = {
    "up": torch.arange(NEURONS * HIDDEN, dtype=torch.float32).view(NEURONS, HIDDEN),
    "down": -torch.arange(NEURONS * HIDDEN, dtype=torch.float32).view(HIDDEN, NEURONS),
}
BIAS = torch.arange(NEURONS, dtype=torch.float32) * 100
LAYOUT = RecordLayout.of({name: tuple(tensor.shape) for name, tensor in TENSORS.items()}, AXES, torch.float32)


def assert_holds(matrix: NeuronMatrix, expected: set[int]) -> None:
    """The matrix holds these neurons, with their own contents, and says of the others that they are absent."""
    rows = {int(neuron): row for row, neuron in enumerate(matrix.neurons)}
    assert set(rows) == expected
    assert matrix.num_used == len(expected)
    for neuron in range(NEURONS):
        assert matrix.row_of[neuron] == rows.get(neuron, ABSENT)
    for neuron, row in rows.items():
        assert torch.equal(matrix.buffer.field("up")[row], TENSORS["up"][neuron])
        assert torch.equal(matrix.buffer.field("down")[row], TENSORS["down"][:, neuron])
        assert matrix.values("bias")[row] == BIAS[neuron]


@given(st.lists(st.tuples(st.sets(st.integers(0, NEURONS - 1)), st.permutations(range(NEURONS))), max_size=12))
def test_any_sequence_of_updates_leaves_what_a_dictionary_would_hold(
    updates: list[tuple[set[int], list[int]]],
) -> None:
    store = MemoryStore(LAYOUT, TENSORS)
    matrix = NeuronMatrix(LAYOUT, CAPACITY, {"bias": BIAS})
    held: set[int] = set()
    for leaving, order in updates:
        deleted = [neuron for neuron in order if neuron in held & leaving]
        matrix.delete(np.array(deleted, dtype=np.int64))
        held -= leaving
        assert_holds(matrix, held)
        new = [neuron for neuron in order if neuron not in held][: CAPACITY - len(held)][: len(order) // 3]
        matrix.append(np.array(new, dtype=np.int64), store).wait()
        held |= set(new)
        assert_holds(matrix, held)


def test_what_was_not_deleted_and_did_not_move_keeps_its_row() -> None:
    matrix = NeuronMatrix(LAYOUT, CAPACITY, {})
    matrix.append(np.arange(10), MemoryStore(LAYOUT, TENSORS)).wait()
    matrix.delete(np.array([2, 9]))
    assert matrix.neurons.tolist() == [0, 1, 8, 3, 4, 5, 6, 7]
