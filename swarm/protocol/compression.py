"""Packed hidden states as bytes, and back.

Formats (see `WireFormat`):
    none                 the tensor's own dtype, little endian
    float16, bfloat16    rounded to 16 bits
    blockwise8           blocks of 256 values share one float32 scale; each value becomes an index into the dynamic
                         8-bit map (Dettmers et al. 2022b, used by Petals section 3.1). Layout: n bytes of indices,
                         then one float32 per block. bitsandbytes does the arithmetic.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from swarm.data_structures import WireFormat
from swarm.errors import WrongDtype, WrongShape

BLOCK = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIXTEEN_BIT = {WireFormat.FLOAT16: "float16", WireFormat.BFLOAT16: "bfloat16"}
_BFLOAT16_INFINITY = {"float32": 0x7F80, "bfloat16": 0x7F80, "float16": 0x4780}
"""The bits of the least bfloat16, its sign taken away, that is infinite in each dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` becomes "float32"."""
    return str(dtype).removeprefix("torch.")


def payload_length(values: int, wire: WireFormat, dtype: str) -> int:
    """Bytes that `values` numbers take. `dtype` matters for `none` only. Raises `WrongDtype` for an unknown one."""
    if dtype not in DTYPES:
        raise WrongDtype(f"hidden states of dtype {dtype[:32]!r} are not accepted; use one of {', '.join(DTYPES)}")
    if wire is WireFormat.BLOCKWISE8:
        return values + 4 * math.ceil(values / BLOCK)
    return values * DTYPES[_SIXTEEN_BIT.get(wire, dtype)].itemsize


def pack(hidden: torch.Tensor, wire: WireFormat) -> bytes | memoryview:
    """Encode a tensor of any shape (float32, bfloat16 or float16).

    Raises `WrongDtype` for other dtypes. With `none` on a CPU the result shares the tensor's memory.
    """
    if dtype_name(hidden.dtype) not in DTYPES:
        raise WrongDtype(f"hidden states of dtype {dtype_name(hidden.dtype)} cannot be sent")
    if wire is WireFormat.BLOCKWISE8:
        return _pack_blockwise(hidden)
    if wire is not WireFormat.NONE:
        hidden = hidden.to(DTYPES[_SIXTEEN_BIT[wire]])
    return _bytes_of(hidden)


def unpack(
    payload: bytes | memoryview, tokens: int, hidden_size: int, wire: WireFormat, dtype: str, device: torch.device
) -> torch.Tensor:
    """Decode `[tokens, hidden_size]` into `dtype` on `device`.

    Raises:
        WrongShape: the payload does not hold that many values.
        WrongDtype: the dtype is unknown.
    """
    values = tokens * hidden_size
    expected = payload_length(values, wire, dtype)
    if len(payload) != expected:
        raise WrongShape(f"{tokens} tokens of {hidden_size} values take {expected} bytes as {wire}, got {len(payload)}")
    target = DTYPES[dtype]
    if values == 0:
        return torch.empty(tokens, hidden_size, dtype=target, device=device)
    if wire is WireFormat.BLOCKWISE8:
        hidden = _unpack_blockwise(payload, values, device)
    else:
        # A bytearray, so that the tensor owns writable memory.
        hidden = torch.frombuffer(bytearray(payload), dtype=DTYPES[_SIXTEEN_BIT.get(wire, dtype)]).to(device)
    return hidden.view(tokens, hidden_size).to(target)


def is_finite(payload: bytes | memoryview, values: int, wire: WireFormat, dtype: str) -> bool:
    """True if none of the `values` numbers of a payload of the right length is NaN, or infinite once in `dtype`."""
    if wire is WireFormat.BLOCKWISE8:  # every index means a share of a scale, at most all of it
        scales = np.frombuffer(payload, np.float32, offset=values) if values else np.empty(0, np.float32)
        return bool((np.abs(scales) <= torch.finfo(DTYPES[dtype]).max).all())
    name = _SIXTEEN_BIT.get(wire, dtype)
    if name == "bfloat16":  # which numpy does not know: the upper half of a float32
        return bool((np.frombuffer(payload, np.uint16) & 0x7FFF < _BFLOAT16_INFINITY[dtype]).all())
    return bool(np.isfinite(np.frombuffer(payload, np.dtype(name))).all())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    # numpy has no bfloat16; the bytes are the same whatever they are called.
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


@cache
def _dynamic_map() -> torch.Tensor:
    from bitsandbytes import functional

    return cast(torch.Tensor, functional.create_dynamic_map())


def _pack_blockwise(hidden: torch.Tensor) -> bytes:
    from bitsandbytes import functional

    flat = hidden.detach().reshape(-1).float()
    if flat.numel() == 0:
        return b""
    indices, state = functional.quantize_blockwise(flat, code=_dynamic_map().to(flat.device), blocksize=BLOCK)
    scales = state.absmax.float()
    if flat.isnan().any():  # which would become an ordinary value, and nobody would know
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scales = scales.masked_fill(blocks.isnan().any(1), torch.nan)
    return bytes(_bytes_of(indices)) + bytes(_bytes_of(scales))


def _unpack_blockwise(payload: bytes | memoryview, values: int, device: torch.device) -> torch.Tensor:
    from bitsandbytes import functional

    buffer: Any = bytearray(payload)
    indices = torch.frombuffer(buffer, dtype=torch.uint8, count=values).to(device)
    scales = torch.frombuffer(buffer[values:], dtype=torch.float32).to(device)
    code = _dynamic_map().to(device)
    values_F = functional.dequantize_blockwise(indices, absmax=scales, code=code, blocksize=BLOCK)
    return cast(torch.Tensor, values_F.float())
