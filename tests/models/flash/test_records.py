"""Records as they lie in memory: layouts, buffers, and the store that has everything in memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.memory_store import MemoryStore
from swarm.models.flash.records import (
    FIELD_ALIGNMENT,
    HUGE_PAGE_BYTES,
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


def test_buffers_of_different_layouts_take_turns_in_the_same_memory():
    small = RecordLayout.of({"a": (3, 5)}, {"a": 0}, torch.float32)
    large = RecordLayout.of({"b": (2, 2000)}, {"b": 0}, torch.float32)
    memory = allocate_aligned(2 * large.stride)
    one, other = RecordBuffer(small, 3, memory), RecordBuffer(large, 2, memory)
    assert one.data.data_ptr() == other.data.data_ptr() == memory.data_ptr()
    assert memory.data_ptr() % RECORD_ALIGNMENT == 0
    with pytest.raises(RuntimeError):
        RecordBuffer(large, 3, memory)


def test_tensors_with_different_numbers_of_records_make_no_layout():
    with pytest.raises(ValueError, match=r"up, down hold \[3, 4\] records"):
        RecordLayout.of({"up": (3, 2), "down": (2, 4)}, {"up": 0, "down": 1}, torch.float32)


@pytest.mark.parametrize("size", [1, 4096, 5 << 20])
def test_memory_is_aligned(size: int) -> None:
    memory = allocate_aligned(size)
    assert memory.shape == (size,)
    assert memory.data_ptr() % RECORD_ALIGNMENT == 0
    memory.fill_(1)


def test_large_memory_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    memory = allocate_aligned(8 << 20)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert "hg" in _mapping_flags(memory.data_ptr())


def _mapping_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping in which an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping at {address:#x}")
