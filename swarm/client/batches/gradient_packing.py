"""Gradients on their way from server to server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import WireFormat
from swarm.protocol.compression import HIDDEN_DTYPES, decode_tensor, encode_tensor

MAX_SCALE_EXPONENT = 100
"""Powers of two that gradients are scaled by at most, so that the factor is a number that float32 has."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HopGradients:
    """What was computed in one server's blocks, or in those of several.

    Attributes:
        inputs: of what went into the blocks, `[tokens, hidden_size]`, float32.
        parts: of the tensors of each block's part of the adapter, float32; those of a block that is left out are zero.
    """

    inputs: torch.Tensor
    parts: Mapping[int, Sequence[torch.Tensor]]


def gradient_wire_format(wire: WireFormat) -> WireFormat:
    """The format of gradients, where hidden states travel in `wire`.

    8 bits are too few for them. Of 16, float16 has eight times the precision of bfloat16; scaled, they fit into it.
    """
    return WireFormat.NONE if wire is WireFormat.NONE else WireFormat.FLOAT16


def pack_scaled(gradient_TH: torch.Tensor, wire: WireFormat, dtype: str) -> tuple[PackedHidden, float]:
    """A gradient times a power of two, so that its largest number is near 1, and what to multiply the answer by.

    Gradients are often less than what 16 bits hold: float16 begins at 6e-8. A power of two changes no digit, and
    whatever is computed from a gradient is proportional to it.

    Args:
        gradient_TH: finite, on the CPU, float32.
        dtype: what `wire` leaves open, see `WireFormat.NONE`.
    """
    largest = float(gradient_TH.abs().max())
    exponent = max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, math.frexp(largest)[1]))
    scaled = (gradient_TH * 2.0**-exponent).to(HIDDEN_DTYPES[dtype] if wire is WireFormat.NONE else torch.float32)
    packed = PackedHidden(encode_tensor(scaled, wire), gradient_TH.shape[0], gradient_TH.shape[1], wire, dtype)
    return packed, 2.0**exponent


def unpack_scaled(packed: PackedHidden, factor: float) -> torch.Tensor:
    """A gradient of the answer `[tokens, hidden_size]`, float32."""
    flat = decode_tensor(packed.payload, packed.tokens, packed.hidden_size, packed.wire, packed.dtype, _CPU)
    return flat.float() * factor
