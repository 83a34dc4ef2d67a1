"""The header of a safetensors file: 8 bytes with its length, then JSON that says where each tensor lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.common.files.checked_json import fields, integer, items, mapping, parse_json, to_json
from swarm.errors import CheckpointError

MAX_HEADER_BYTES = 32 << 20
ALIGNMENT = 8
"""Of the first tensor in a file, in bytes."""

LENGTH_BYTES = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes that safetensors and torch both have, by safetensors' names."""


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of a tensor. `dtype` is safetensors' name of it, `offset` where it begins in its file."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int


def parse_header(data: bytes) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file, from its header with the 8 bytes before it.

    Raises `ValueError` if it is malformed, also where a tensor's size does not follow from its shape.
    """
    length = header_length(data)
    described = mapping(parse_json(data[LENGTH_BYTES:length]))
    described.pop("__metadata__", None)
    return {name: _stored_tensor(one, length) for name, one in described.items()}


def header_length(start: bytes) -> int:
    """Bytes up to the first tensor, from a file's first 8 bytes. Raises `ValueError`."""
    if len(start) < LENGTH_BYTES:
        raise ValueError("the file is too short")
    return LENGTH_BYTES + integer(int.from_bytes(start[:LENGTH_BYTES], "little"), 2, MAX_HEADER_BYTES)


def read_header(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a file on this machine. Raises `CheckpointError` if it is not a complete safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            found = parse_header(start + file.read(header_length(start) - LENGTH_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    if any(one.offset + one.size_bytes > size for one in found.values()):
        raise CheckpointError(f"{path} is shorter than its header says: download it again")
    return found


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; `dtype` is safetensors' name. Raises `ValueError` if there is no such dtype."""
    if dtype not in DTYPES:
        raise ValueError("a tensor has an unknown dtype")
    return math.prod(shape) * DTYPES[dtype].itemsize


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file in which these tensors lie one behind the other.

    Args:
        tensors: name, safetensors' name of the dtype, and shape of each.
    """
    described: dict[str, object] = {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + size_of(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = to_json(described)
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _stored_tensor(described: object, header: int) -> StoredTensor:
    dtype, shape, offsets = fields(described, ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError("a tensor has an unknown dtype")
    dims = tuple(integer(one, 0, 1 << 48) for one in items(shape, 16))
    begin, end = (integer(one, 0, 1 << 56) for one in items(offsets, length=2))
    if end - begin != size_of(dtype, dims):
        raise ValueError("a tensor's size does not follow from its shape")
    return StoredTensor(dtype, dims, end - begin, header + begin)
