"""Adapters and their gradients as bytes, and back.

A block's adapter consists of a soft prompt, which is added to the block's inputs, and LoRA factors of some of its
linear modules (Hu et al. 2021). Its bytes are the prompt, then A and B of each module, row by row, little endian. It is
named by a digest of its shapes and bytes: equal weights have the same name at every server, different weights have
different names. Gradients have the same order and are always float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec
import torch

from swarm.common.dtypes import HIDDEN_DTYPES, dtype_name
from swarm.data_structures import WireFormat
from swarm.errors import NotFinite, WrongShape
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.protocol.compression import GRADIENT_DTYPE, decode_tensor, encode_tensor, is_finite, payload_bytes
from swarm.protocol.messages import ADAPTER_DIGEST_BYTES, BlockAdapterSpec, LoraShape


def pack_adapters(parts: Sequence[BlockAdapterWeights], dtype: torch.dtype) -> tuple[list[BlockAdapterSpec], bytes]:
    """The specs of some blocks' adapters, and their concatenated bytes in `dtype`."""
    blocks, payloads = [], []
    for part in parts:
        payload = b"".join(encode_tensor(tensor.to(dtype), WireFormat.NONE) for tensor in part.tensors)
        prompt = 0 if part.prompt is None else len(part.prompt)
        modules = [LoraShape(one.module, one.down.shape[0], one.down.shape[1], len(one.up)) for one in part.factors]
        blocks.append(BlockAdapterSpec(adapter_digest(prompt, modules, payload, dtype_name(dtype)), prompt, modules))
        payloads.append(payload)
    return blocks, b"".join(payloads)


def unpack_adapters(
    blocks: Sequence[BlockAdapterSpec], payload: bytes | memoryview, dtype: str, hidden_size: int, device: torch.device
) -> list[BlockAdapterWeights]:
    """The inverse of `pack_adapters`.

    Raises:
        WrongShape: the payload's length or a digest does not match the specs.
        WrongDtype: the dtype is unknown.
        NotFinite: the payload holds NaN or infinity.
    """
    lengths = [payload_bytes(count_values(block, hidden_size), WireFormat.NONE, dtype) for block in blocks]
    if len(payload) != sum(lengths):
        raise WrongShape(f"the adapters described take {sum(lengths)} bytes as {dtype}, got {len(payload)}")
    parts, view, first = [], memoryview(payload), 0
    for block, length in zip(blocks, lengths, strict=True):
        mine = view[first : first + length]
        if adapter_digest(block.prompt_length, block.modules, mine, dtype) != block.digest:
            raise WrongShape("an adapter's bytes do not match the digest that it was announced with; send it again")
        if not is_finite(mine, length // HIDDEN_DTYPES[dtype].itemsize, WireFormat.NONE, dtype):
            raise NotFinite("an adapter holds NaN or infinity; check the weights that were trained")
        flat = decode_tensor(mine, 1, length // HIDDEN_DTYPES[dtype].itemsize, WireFormat.NONE, dtype, device)[0]
        parts.append(_part(block, list(_split(flat, block, hidden_size))))
        first += length
    return parts


def unpack_gradients(
    blocks: Sequence[BlockAdapterSpec], payload: bytes | memoryview, hidden_size: int
) -> list[list[torch.Tensor]]:
    """For each block, the float32 gradients of its tensors, on the CPU. Raises `WrongShape` or `NotFinite`."""
    values = [count_values(block, hidden_size) for block in blocks]
    name = dtype_name(GRADIENT_DTYPE)
    if len(payload) != gradient_bytes(blocks, hidden_size):
        raise WrongShape(f"the gradients of these adapters are {sum(values)} numbers, got {len(payload)} bytes")
    if not is_finite(payload, sum(values), WireFormat.NONE, name):
        raise NotFinite("an adapter's gradients hold NaN or infinity")
    flat = decode_tensor(payload, 1, sum(values), WireFormat.NONE, name, torch.device("cpu"))[0]
    return [list(_split(mine, block, hidden_size)) for block, mine in zip(blocks, flat.split(values), strict=True)]


def gradient_bytes(blocks: Sequence[BlockAdapterSpec], hidden_size: int) -> int:
    """Size in bytes of the gradients of some blocks' adapters."""
    return GRADIENT_DTYPE.itemsize * sum(count_values(block, hidden_size) for block in blocks)


def count_values(block: BlockAdapterSpec, hidden_size: int) -> int:
    """Number of values in a block's adapter."""
    return block.prompt_length * hidden_size + sum(one.rank * (one.inputs + one.outputs) for one in block.modules)


def adapter_digest(prompt: int, modules: Sequence[LoraShape], payload: bytes | memoryview, dtype: str) -> bytes:
    """The digest that names a block's adapter."""
    digest = hashlib.blake2b(msgspec.msgpack.encode((prompt, modules, dtype)), digest_size=ADAPTER_DIGEST_BYTES)
    digest.update(payload)
    return digest.digest()


def _shapes(block: BlockAdapterSpec, hidden_size: int) -> Iterator[tuple[int, int]]:
    if block.prompt_length:
        yield block.prompt_length, hidden_size
    for one in block.modules:
        yield one.rank, one.inputs
        yield one.outputs, one.rank


def _split(flat: torch.Tensor, block: BlockAdapterSpec, hidden_size: int) -> Iterator[torch.Tensor]:
    shapes = list(_shapes(block, hidden_size))
    for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
        yield piece.view(shape)


def _part(block: BlockAdapterSpec, tensors: list[torch.Tensor]) -> BlockAdapterWeights:
    rest = tensors[1:] if block.prompt_length else tensors
    factors = [
        LoraFactors(one.module, down, up) for one, down, up in zip(block.modules, rest[::2], rest[1::2], strict=True)
    ]
    return BlockAdapterWeights(tensors[0] if block.prompt_length else None, tuple(factors))
