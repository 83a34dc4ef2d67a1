"""Writing a block's packed files: large sequential writes, digests on the way, no second copy of the block."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from swarm.models.flash.files.block_files import UNFINISHED
from swarm.models.flash.files.content_digests import PartDigests
from swarm.models.flash.files.manifest import FileContent
from swarm.models.flash.records.record_buffer import RecordBuffer
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.protocol.compression import dtype_name

WRITE_BYTES = 16 << 20
"""Bytes of one write, and of the records that are put together in memory."""

HEADER_ALIGNMENT = 64
_SAFETENSORS_DTYPES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
}


def record_bytes(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the records file in order, as uint8 tensors that are valid until the next one is asked for.

    Small records are put together in a buffer of `WRITE_BYTES`; of a large one, each field is given as it lies in its
    tensor.
    """
    if layout.stride < WRITE_BYTES:
        yield from _bytes_of_small_records(layout, tensors)
    else:
        yield from _bytes_of_large_records(layout, tensors)


def _bytes_of_small_records(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    slots = min(WRITE_BYTES // layout.stride, layout.count)
    buffer = RecordBuffer(layout, slots)
    buffer.data.zero_()  # what lies between fields is written too
    parts = {field.tensor: field.parts(tensors[field.tensor]) for field in layout.fields}
    for start in range(0, layout.count, slots):
        number = min(slots, layout.count - start)
        for tensor, parts_of_tensor in parts.items():
            part = parts_of_tensor[start : start + number]
            buffer.field(tensor)[:number].copy_(part if part.dim() > 1 else part.unsqueeze(1))
        yield buffer.data[:number].view(-1)


def _bytes_of_large_records(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for record in range(layout.count):
        written = 0
        for field in layout.fields:
            if field.offset > written:
                yield torch.zeros(field.offset - written, dtype=torch.uint8)
            part = _bytes_of(field.parts(tensors[field.tensor])[record])
            yield part
            written = field.offset + part.numel()
        if layout.stride > written:
            yield torch.zeros(layout.stride - written, dtype=torch.uint8)


def safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of a safetensors file, tensor by tensor: the library would put the whole file together in memory."""
    header: dict[str, object] = {}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype_name(tensors[name].dtype)],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT)
    yield torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    for name in sorted(tensors):
        yield _bytes_of(tensors[name])


def write_file(path: Path, pieces: Iterator[torch.Tensor]) -> FileContent:
    """Write a file that is there completely or not at all, even if the power fails. Returns what it holds.

    Raises `OSError`; nothing is left of the file then.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    digests, size = PartDigests(), 0
    try:
        # One thread hashes what this one writes: both let go of the interpreter.
        with open(unfinished, "wb", buffering=0) as file, ThreadPoolExecutor(1, "swarm-digest") as pool:
            for piece in pieces:
                data = piece.numpy().data
                size += len(data)
                hashing = pool.submit(digests.update, data)
                try:
                    _write_all(file.fileno(), data)
                finally:
                    hashing.result()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return FileContent(size, digests.finish())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder permanent. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data[:WRITE_BYTES]) :]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in order, as bytes; copied only if they lie in another order."""
    values = tensor.detach().contiguous().view(-1)
    if values.stride(0) != 1:  # a single value that was cut from a tensor counts as contiguous
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)
