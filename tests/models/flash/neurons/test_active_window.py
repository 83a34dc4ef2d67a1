from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.flash.neurons.active_window import ActiveWindow, ForwardTokens
from swarm.models.flash.neurons.neuron_matrix import NeuronMatrix
from swarm.models.flash.records import RecordLayout
from swarm.models.flash.stay_priority import HALF_LIFE

NEURONS = 30
TENSORS = {"up": torch.arange(NEURONS * 2, dtype=torch.float32).view(NEURONS, 2)}
LAYOUT = RecordLayout.of({"up": (NEURONS, 2)}, {"up": 0}, torch.float32)


class Memory:
    """A matrix that follows its window's decisions."""

    def __init__(self, capacity: int) -> None:
        self.matrix = NeuronMatrix(LAYOUT, capacity, {})
        self.window = ActiveWindow(self.matrix)
        self.store = MemoryStore(LAYOUT, TENSORS)

    def forward(self, *needed: int, kept: list[int] | None = None) -> list[list[int]]:
        """The neurons that each portion read."""
        read = []
        portions = self.window.portions(np.array(needed, dtype=np.int64), None if kept is None else np.array(kept))
        for portion in portions:
            self.matrix.delete(portion.leaving)
            self.matrix.append(portion.joining, self.store).wait()
            assert set(portion.needed) <= set(self.matrix.neurons)
            read.append(portion.joining.tolist())
        return read

    def prompt(self, *needed: int, tokens: int = 1, shares: list[float] | None = None) -> None:
        """All neurons pass by, of which the last tokens need these."""
        given = np.ones(len(needed)) if shares is None else np.array(shares)
        portion = self.window.while_all_pass(np.array(needed, dtype=np.int64), given, tokens)
        self.matrix.delete(portion.leaving)
        self.matrix.append(portion.joining, self.store).wait()

    @property
    def held(self) -> set[int]:
        return set(self.matrix.neurons.tolist())


def test_only_what_is_not_in_memory_is_read() -> None:
    memory = Memory(10)
    assert memory.forward(1, 2, 3) == [[1, 2, 3]]
    assert memory.forward(2, 3, 4) == [[4]]
    assert memory.forward(1, 4) == [[]]


def test_what_is_needed_often_outlives_what_was_needed_last() -> None:
    memory = Memory(3)
    for _ in range(3):
        memory.forward(1)
    memory.forward(2)
    memory.forward(3)
    memory.forward(4)
    assert memory.held == {1, 3, 4}


def test_after_a_prompt_memory_holds_what_is_needed_most_often() -> None:
    memory = Memory(3)
    for _ in range(8):
        memory.forward(0, 9)
    memory.forward(8)
    memory.prompt(1, 2, 3, 4, tokens=40, shares=[0.1, 1.0, 0.02, 0.9])
    assert memory.held == {2, 4, 0} or memory.held == {2, 4, 9}
    before = memory.held
    memory.prompt(tokens=4)
    assert memory.held == before, "of equals, what is there stays"


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, NEURONS - 1), max_size=8)), max_size=15),
)
def test_what_leaves_is_needed_no_more_often_than_what_stays(
    capacity: int, forwards: list[tuple[bool, set[int]]]
) -> None:
    memory = Memory(capacity)
    counts = dict.fromkeys(range(NEURONS), 0.0)
    for is_prompt, some in forwards:
        needed = set(sorted(some)[:capacity])
        counts = {neuron: count * 0.5 ** (1 / HALF_LIFE) for neuron, count in counts.items()}
        for neuron in needed:
            counts[neuron] += 1
        before = memory.held
        if is_prompt:
            memory.prompt(*sorted(needed))
            outside = [counts[neuron] for neuron in counts.keys() - memory.held]
            assert min((counts[neuron] for neuron in memory.held), default=0) >= max(outside) - 1e-6
        else:
            memory.forward(*sorted(needed))
            left = max((counts[neuron] for neuron in before - memory.held), default=0.0)
            assert all(counts[neuron] >= left - 1e-6 for neuron in memory.held - needed)
            assert memory.held >= needed
            assert len(memory.held) == min(capacity, len(before | needed)), "nothing leaves without need"


def test_a_forward_that_needs_more_than_memory_holds_is_computed_in_portions() -> None:
    memory = Memory(4)
    memory.forward(3, 7)
    assert memory.forward(*range(10)) == [[0, 1], [2, 4, 5, 6], [8, 9]]


def test_neurons_of_candidates_that_are_not_expected_to_be_accepted_leave_first() -> None:
    memory = Memory(4)
    memory.forward(1)
    memory.forward(2, 3, 4, kept=[2])
    memory.forward(5)
    assert memory.held == {1, 2, 4, 5} or memory.held == {1, 2, 3, 5}


def test_the_window_ends_at_the_expected_accepted_token_of_each_sequence() -> None:
    expected = ForwardTokens((1, 5, 2), accepted=0.5).expected(8)
    assert expected is not None
    assert expected.tolist() == [True, *[True] * 3, False, False, True, False]


@given(
    st.integers(1, 12),
    st.lists(st.sets(st.integers(0, NEURONS - 1)), max_size=15),
)
def test_whatever_is_needed_everything_is_computed_once_and_memory_is_never_exceeded(
    capacity: int, needs: list[set[int]]
) -> None:
    memory = Memory(capacity)
    for needed in needs:
        before = memory.held
        read = [neuron for portion in memory.forward(*sorted(needed)) for neuron in portion]
        assert sorted(read) == sorted(needed - before)  # nothing twice, and nothing that was there
        assert len(memory.held) <= capacity
