"""The bytes of packed files: records come back as tensors, in whichever way they were put together."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from swarm.models.flash.files import manifest as manifests
from swarm.models.flash.files import record_writing
from swarm.models.flash.records import RecordBuffer, RecordLayout

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
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


@pytest.mark.parametrize("size", [0, 100, 250])
def test_a_file_and_its_digests(tmp_path, monkeypatch, size):
    monkeypatch.setattr(manifests, "PART_BYTES", 100)
    monkeypatch.setattr(record_writing, "WRITE_BYTES", 30)
    data = torch.randint(256, (size,), dtype=torch.uint8)
    content = record_writing.write_file(tmp_path / "file", iter(data.split(70)))
    written = (tmp_path / "file").read_bytes()
    assert written == data.numpy().tobytes()
    assert content.size == size
    parts = [written[start : start + 100] for start in range(0, size, 100)]
    assert list(content.parts) == [hashlib.sha256(part).hexdigest() for part in parts]
    manifests.verify_parts(tmp_path / "file", content.parts)


@pytest.fixture
def direct_writes(tmp_path) -> None:
    """Skips the test where there are none."""
    descriptor = record_writing._opened(tmp_path / "tried")
    direct = record_writing._write_cached(descriptor)
    os.close(descriptor)
    if not direct:
        pytest.skip("the file system of temporary files has no direct writes")


@pytest.mark.parametrize("refused", ["nothing", "when it is opened", "when it is written"])
def test_direct_writes_and_file_systems_without_them(tmp_path, monkeypatch, direct_writes, refused):
    """All but the odd end of a file is written past the page cache, unless the file system says no."""
    really_open, really_write, ways = os.open, os.write, []

    def open_file(path, flags, *args, **kwargs):
        if refused == "when it is opened" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *args, **kwargs)

    def write(descriptor, data):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if refused == "when it is written" and direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        ways.append((direct, len(data)))
        return really_write(descriptor, data)

    monkeypatch.setattr(record_writing, "WRITE_BYTES", 8192)
    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "write", write)
    data = torch.randint(256, (20_000,), dtype=torch.uint8)
    record_writing.write_file(tmp_path / "file", [data])
    direct = refused == "nothing"
    assert ways == [(direct, 8192), (direct, 8192), (False, 20_000 - 2 * 8192)]
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


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
