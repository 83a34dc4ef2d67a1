"""The bytes of packed files: records come back as tensors, in whichever way they were put together."""

from __future__ import annotations

import errno
import hashlib
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from swarm.models.flash.files import content_digests, record_writing
from swarm.models.flash.records.record_buffer import RecordBuffer
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.models.flash.records.weight_store import MemoryStore

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def blocks(draw) -> tuple[RecordLayout, dict[str, torch.Tensor]]:
    """A few tensors with the same number of records along different axes; or whole tensors, in one record."""
    count = draw(st.integers(1, 40))
    whole = draw(st.booleans())
    tensors: dict[str, torch.Tensor] = {}
    axes: dict[str, int | None] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), min_size=1 if whole else 0, max_size=3))
        axis = None if whole else draw(st.integers(0, len(shape)))
        if axis is not None:
            shape.insert(axis, count)
        tensors[f"weight{number}"] = torch.randn(shape)
        axes[f"weight{number}"] = axis
    dtype = draw(st.sampled_from(DTYPES))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return RecordLayout.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, axes, dtype), tensors


def joined(pieces) -> torch.Tensor:
    return torch.cat([piece.clone() for piece in pieces])


@given(blocks(), st.sampled_from([1, 4096, 10_000, 1 << 20]))
def test_records_hold_the_tensors_bit_for_bit(block, write_bytes):
    layout, tensors = block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_writing, "WRITE_BYTES", write_bytes)
        written = joined(record_writing.record_bytes(layout, tensors))
    assert len(written) == layout.file_bytes
    buffer = RecordBuffer(layout, layout.count)
    buffer.data.copy_(written.view(layout.count, layout.stride))
    for field in layout.fields:
        parts = field.parts(tensors[field.tensor])
        assert torch.equal(buffer.field(field.tensor).view(parts.shape), parts)


@given(blocks(), st.sampled_from([1, 4096, 10_000, 1 << 20]))
def test_the_same_weights_give_the_same_bytes(block, write_bytes):
    """Also between fields and records: digests of what was written twice are equal."""
    layout, tensors = block
    whole = joined(record_writing.record_bytes(layout, tensors))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_writing, "WRITE_BYTES", write_bytes)
        assert torch.equal(joined(record_writing.record_bytes(layout, tensors)), whole)


def test_records_are_those_of_the_store_in_memory():
    tensors = {"up": torch.randn(7, 5), "down": torch.randn(3, 7)}
    layout = RecordLayout.of({"up": (7, 5), "down": (3, 7)}, {"up": 0, "down": 1}, torch.float32)
    written = joined(record_writing.record_bytes(layout, tensors)).view(7, layout.stride)
    buffer = RecordBuffer(layout, 2)
    MemoryStore(layout, tensors).read(np.array([4, 2]), buffer, np.array([0, 1])).wait()
    for name in tensors:
        found = RecordBuffer(layout, 7)
        found.data.copy_(written)
        assert torch.equal(buffer.field(name), found.field(name)[[4, 2]])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64, torch.uint8])
def test_other_tensors_are_a_safetensors_file(dtype):
    tensors = {
        "scale": torch.tensor(3),
        "norm": torch.ones(5),
        "q.weight": torch.randn(4, 6).t(),
        "none": torch.ones(0),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    found = load_safetensors(joined(record_writing.safetensors_bytes(tensors)).numpy().tobytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250])
def test_a_file_and_its_digests(tmp_path, monkeypatch, size):
    monkeypatch.setattr(content_digests, "PART_BYTES", 100)
    monkeypatch.setattr(record_writing, "WRITE_BYTES", 30)
    data = torch.randint(256, (size,), dtype=torch.uint8)
    content = record_writing.write_file(tmp_path / "file", iter(data.split(70)))
    written = (tmp_path / "file").read_bytes()
    assert written == data.numpy().tobytes()
    assert content.size == size
    parts = [written[start : start + 100] for start in range(0, size, 100)]
    assert list(content.parts) == [hashlib.sha256(part).hexdigest() for part in parts]
    content_digests.verify_parts(tmp_path / "file", content.parts)


def test_a_write_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def pieces():
        yield torch.zeros(10, dtype=torch.uint8)
        raise OSError(errno.EIO, "the drive failed")

    with pytest.raises(OSError, match="the drive failed"):
        record_writing.write_file(path, pieces())
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]
