"""Gradients encoded for the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.data_structures import WireFormat
from swarm.protocol.compression import decode_tensor, encode_tensor

MAX_SCALE_EXPONENT = 100
"""Largest exponent of the power of two that scales gradients, so that float32 can represent the factor."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HopGradients:
    """Gradients of the blocks of one hop or of several.

    Attributes:
        inputs: gradient of the blocks' inputs, `[tokens, hidden_size]`, float32.
        parts: gradients of the adapter's tensors by block, float32; those of a missing block are zero.
    """

    inputs: torch.Tensor
    parts: Mapping[int, Sequence[torch.Tensor]]


def gradient_wire_format(wire: WireFormat) -> WireFormat:
    """The wire format of gradients where hidden states use `wire`.

    Gradients need more than 8 bits. Of the 16-bit formats, float16 has eight times the precision of bfloat16, and
    scaled gradients fit into its range.
    """
    return WireFormat.NONE if wire is WireFormat.NONE else WireFormat.FLOAT16


def pack_scaled(gradient_TH: torch.Tensor, wire: WireFormat, dtype: str) -> tuple[PackedHidden, float]:
    """Scale a gradient by a power of two so that its largest value is near 1, and encode it.

    Gradients are often below the range of 16 bits: float16 begins at 6e-8. A power of two changes no digit, and
    everything that is computed from a gradient is proportional to it.

    Args:
        gradient_TH: finite, on the CPU, float32.
        dtype: the dtype on the wire if `wire` is `WireFormat.NONE`.

    Returns:
        the encoded gradient, and the factor for `unpack_scaled` of the reply.
    """
    largest = float(gradient_TH.abs().max())
    exponent = max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, math.frexp(largest)[1]))
    scaled = (gradient_TH * 2.0**-exponent).to(HIDDEN_DTYPES[dtype] if wire is WireFormat.NONE else torch.float32)
    packed = PackedHidden(encode_tensor(scaled, wire), gradient_TH.shape[0], gradient_TH.shape[1], wire, dtype)
    return packed, 2.0**exponent


def unpack_scaled(packed: PackedHidden, factor: float) -> torch.Tensor:
    """The gradient in a reply, `[tokens, hidden_size]`, float32, with the scale of `pack_scaled` undone."""
    flat = decode_tensor(packed.payload, packed.tokens, packed.hidden_size, packed.wire, packed.dtype, _CPU)
    return flat.float() * factor
