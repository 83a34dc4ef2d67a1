"""Records as they lie in memory: layouts, buffers, and the store that has everything in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.flash.records import (
    FIELD_ALIGNMENT,
    RECORD_ALIGNMENT,
    RecordBuffer,
    RecordLayout,
    allocate_aligned,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), DTYPES)
def test_a_record_holds_its_part_of_each_tensor(count, inputs, outputs, dtype):
    tensors = {
        "up": torch.randn(count, inputs).to(dtype),
        "down": torch.randn(outputs, count).to(dtype),
        "bias": torch.randn(count).to(dtype),
    }
    layout = RecordLayout.of(shapes_of(tensors), {"up": 0, "down": 1, "bias": 0}, dtype)
    store, buffer = MemoryStore(layout, tensors), RecordBuffer(layout, count)
    order = np.random.default_rng(0).permutation(count)
    store.read(order, buffer, np.arange(count)).wait()
    for slot, record in enumerate(order):
        assert torch.equal(buffer.field("up")[slot], tensors["up"][record])
        assert torch.equal(buffer.field("down")[slot], tensors["down"][:, record])
        assert torch.equal(buffer.field("bias")[slot], tensors["bias"][record : record + 1])


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5), DTYPES)
def test_tensors_without_an_axis_are_whole_in_one_record(shapes, dtype):
    tensors = {str(number): torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    layout = RecordLayout.of(shapes_of(tensors), dict.fromkeys(tensors), dtype)
    assert layout.count == 1
    store, buffer = MemoryStore(layout, tensors), RecordBuffer(layout, 1)
    store.read(np.array([0]), buffer, np.array([0])).wait()
    for name, tensor in tensors.items():
        assert torch.equal(buffer.field(name)[0], tensor)
        assert layout.field(name).offset % FIELD_ALIGNMENT == 0


@pytest.mark.parametrize("size", [1, 4096, 5 << 20])
def test_memory_is_aligned(size: int) -> None:
    memory = allocate_aligned(size)
    assert memory.shape == (size,)
    assert memory.data_ptr() % RECORD_ALIGNMENT == 0
    memory.fill_(1)
