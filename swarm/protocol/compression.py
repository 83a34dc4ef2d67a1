"""Hidden states and other tensors as bytes, and back.

Formats (see `WireFormat`):
    none                 the tensor's own dtype, little endian
    float16, bfloat16    rounded to 16 bits; float16 ends at 65504, and the hidden states of some models exceed it
    blockwise8           blocks of 256 values share one float32 scale; each value becomes an index into the dynamic
                         8-bit map (Dettmers et al. 2022b, used by Petals section 3.1). Layout: n bytes of indices,
                         then one float32 per block. bitsandbytes does the arithmetic.

Their cost in bytes and milliseconds: `benchmarks/network/wire.py`. Their cost in quality: `docs/wire.md`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np
import torch

from swarm.common.dtypes import HIDDEN_DTYPES, dtype_name
from swarm.data_structures import WireFormat
from swarm.errors import WrongDtype, WrongShape

VALUES_PER_SCALE = 256
GRADIENT_DTYPE = torch.float32
_SIXTEEN_BIT = {WireFormat.FLOAT16: "float16", WireFormat.BFLOAT16: "bfloat16"}
_SIGN = 0x8000
_INFINITY = {
    "bfloat16": {"float32": 0x7F80, "bfloat16": 0x7F80, "float16": 0x4780},
    "float16": {"float32": 0x7C00, "bfloat16": 0x7C00, "float16": 0x7C00},
}
"""For each 16-bit format and dtype, the bits of the smallest number that becomes infinite in that dtype. All larger bit
patterns are infinite or NaN too."""


@lru_cache(1024)
def payload_bytes(values: int, wire: WireFormat, dtype: str) -> int:
    """Bytes that `values` encoded numbers take. Only `none` depends on the dtype. Raises `WrongDtype` if unknown."""
    if dtype not in HIDDEN_DTYPES:
        raise WrongDtype(
            f"hidden states of dtype {dtype[:32]!r} are not accepted; use one of {', '.join(HIDDEN_DTYPES)}"
        )
    if wire is WireFormat.BLOCKWISE8:
        return values + 4 * math.ceil(values / VALUES_PER_SCALE)
    return values * HIDDEN_DTYPES[_SIXTEEN_BIT.get(wire, dtype)].itemsize


def load_quantizer(device: torch.device) -> None:
    """Load what the 8-bit format needs. This takes a second or more, so do it before the first step is waited for."""
    _dynamic_map(device)


def encode_tensor(hidden: torch.Tensor, wire: WireFormat) -> bytes | memoryview:
    """Encode a tensor of any shape (float32, bfloat16 or float16).

    With `none` on a CPU the result shares the tensor's memory.

    Raises:
        WrongDtype: the dtype is another one, or a finite value does not fit into the requested float16. Sent as
            infinity, the value would look like a fault of the peer that computed it.
    """
    if dtype_name(hidden.dtype) not in HIDDEN_DTYPES:
        raise WrongDtype(f"hidden states of dtype {dtype_name(hidden.dtype)} cannot be sent")
    if wire is WireFormat.BLOCKWISE8:
        return _pack_blockwise(hidden)
    if wire is WireFormat.NONE:
        return _bytes_of(hidden)
    payload = _bytes_of(hidden.to(HIDDEN_DTYPES[_SIXTEEN_BIT[wire]]))
    if wire is WireFormat.FLOAT16 and not is_finite(payload, hidden.numel(), wire, "float16"):
        largest = float(hidden.detach().abs().max())
        if math.isfinite(largest):
            raise WrongDtype(
                f"hidden states of this model reach {largest:.3g}, and float16 ends at 65504; "
                'use wire="bfloat16" or wire="blockwise8"'
            )
    return payload


def decode_tensor(
    payload: bytes | memoryview, tokens: int, hidden_size: int, wire: WireFormat, dtype: str, device: torch.device
) -> torch.Tensor:
    """Decode `[tokens, hidden_size]` into `dtype` on `device`.

    Raises:
        WrongShape: the payload does not hold `tokens * hidden_size` values.
        WrongDtype: the dtype is unknown.
    """
    values = tokens * hidden_size
    expected = payload_bytes(values, wire, dtype)
    if len(payload) != expected:
        raise WrongShape(f"{tokens} tokens of {hidden_size} values take {expected} bytes as {wire}, got {len(payload)}")
    target = HIDDEN_DTYPES[dtype]
    if values == 0:
        return torch.empty(tokens, hidden_size, dtype=target, device=device)
    if wire is WireFormat.BLOCKWISE8:
        hidden = _unpack_blockwise(payload, values, device)
    else:
        # A bytearray, so that the tensor owns writable memory.
        hidden = torch.frombuffer(bytearray(payload), dtype=HIDDEN_DTYPES[_SIXTEEN_BIT.get(wire, dtype)]).to(device)
    return hidden.view(tokens, hidden_size).to(target)


def pack_gradients(gradients: Sequence[torch.Tensor]) -> bytes:
    """Encode the gradients of some adapters' tensors, in order, as `GRADIENT_DTYPE`."""
    return b"".join(encode_tensor(gradient.to(GRADIENT_DTYPE), WireFormat.NONE) for gradient in gradients)


def is_finite(payload: bytes | memoryview, values: int, wire: WireFormat, dtype: str) -> bool:
    """Whether none of a payload's `values` numbers is NaN, or becomes infinite in `dtype`. Its length must be right."""
    if wire is WireFormat.BLOCKWISE8:  # every index stands for a fraction of its scale
        scales = np.frombuffer(payload, np.float32, offset=values) if values else np.empty(0, np.float32)
        return bool((np.abs(scales) <= torch.finfo(HIDDEN_DTYPES[dtype]).max).all())
    name = _SIXTEEN_BIT.get(wire, dtype)
    if name == "float32":
        return bool(np.isfinite(np.frombuffer(payload, np.float32)).all())
    # numpy has no bfloat16 and is slow with float16. As integers both are ordered by size: the largest signed one is
    # the largest positive number, the largest unsigned one the lowest negative number, if there is any.
    bits, limit = np.frombuffer(payload, np.uint16), _INFINITY[name][dtype]
    return int(bits.view(np.int16).max(initial=0)) < limit and int(bits.max(initial=0)) < _SIGN | limit


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    # numpy has no bfloat16, so the tensor is viewed as bytes.
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


@cache
def _operators() -> Any:
    """bitsandbytes' operators. Calling them without its `functional` wrapper saves half of their cost per token."""
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)  # it warns about a kernel that is not used here
    try:
        import bitsandbytes  # noqa: F401
    finally:
        log.setLevel(before)
    return torch.ops.bitsandbytes


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    _operators()
    from bitsandbytes import functional

    return cast(torch.Tensor, functional.create_dynamic_map()).to(device)


def _pack_blockwise(hidden: torch.Tensor) -> bytes:
    flat = hidden.detach().reshape(-1).float()
    if flat.numel() == 0:
        return b""
    code = _dynamic_map(flat.device)
    indices, scales = _operators().quantize_blockwise.default(flat, code, VALUES_PER_SCALE)
    # Quantization would silently turn NaN into an ordinary value. If the sum is not NaN, none of its terms is; if it is
    # NaN, the reason may also be infinities.
    if math.isnan(float(flat.sum())):
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % VALUES_PER_SCALE)).view(-1, VALUES_PER_SCALE)
        scales = scales.masked_fill(blocks.isnan().any(1), torch.nan)
    return b"".join((indices.cpu().numpy(), scales.cpu().numpy()))


def _unpack_blockwise(payload: bytes | memoryview, values: int, device: torch.device) -> torch.Tensor:
    indices = torch.from_numpy(np.frombuffer(payload, np.uint8, values).copy()).to(device)
    scales = torch.from_numpy(np.frombuffer(payload, np.float32, offset=values).copy()).to(device)
    code = _dynamic_map(device)
    return cast(
        torch.Tensor, _operators().dequantize_blockwise.default(indices, scales, code, VALUES_PER_SCALE, torch.float32)
    )
