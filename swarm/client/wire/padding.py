"""Batches as transformers has them, `[rows, slots]` with padding, and as they travel: packed tokens, row after row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import StepLayout, WireFormat
from swarm.protocol.compression import decode_tensor, dtype_name, encode_tensor


@dataclass(frozen=True)
class PaddedBatch:
    """Which slots of `[rows, slots]` hold tokens, and where these stand.

    Attributes:
        counts: tokens of each row.
        real: which slots are no padding; None if all are. On the CPU.
        positions: position ids that the family would be told, or None.
    """

    counts: tuple[int, ...]
    real: torch.Tensor | None
    positions: torch.Tensor | None

    def __getitem__(self, rows: torch.Tensor | slice) -> PaddedBatch:
        """Some of the rows."""
        index = torch.arange(len(self.counts))[rows]
        counts = tuple(self.counts[row] for row in index.tolist())
        real = self.real[index] if self.real is not None else None
        return PaddedBatch(counts, real, self.positions[index] if self.positions is not None else None)

    @property
    def layout(self) -> StepLayout:
        """Whole sequences."""
        layout = StepLayout((0,) * len(self.counts), self.counts)
        return replace(layout, offsets=position_offsets(self.positions, self.real, layout))


def position_offsets(
    positions: torch.Tensor | None, real: torch.Tensor | None, layout: StepLayout
) -> tuple[int, ...] | None:
    """How far each row's positions are from counting its real tokens; None if they are just that.

    Args:
        positions: `[rows or 1, slots]`, or None.
        real: which slots are real `[rows, slots]`, None for all.
    """
    if positions is None or not layout.tokens:
        return None
    if real is None:
        first = positions[:, 0].expand(layout.sequences)
    else:
        first = positions.expand(layout.sequences, -1).gather(
            1, real.long().argmax(1, keepdim=True).to(positions.device)
        )[:, 0]
    offsets = tuple(max(0, at - start) for at, start in zip(first.tolist(), layout.starts, strict=True))
    return offsets if any(offsets) else None


def pack_hidden(hidden: torch.Tensor, real: torch.Tensor | None, wire: WireFormat) -> PackedHidden:
    """The real slots of `[rows, slots, hidden_size]`, row after row, encoded for the wire."""
    flat = drop_padding(hidden, real)
    return PackedHidden(encode_tensor(flat, wire), flat.shape[0], flat.shape[1], wire, dtype_name(hidden.dtype))


def unpack_hidden(packed: PackedHidden, like: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `pack_hidden`, in shape, dtype and device of `like`; padded slots are zero."""
    flat = decode_tensor(packed.payload, packed.tokens, packed.hidden_size, packed.wire, packed.dtype, like.device)
    return restore_padding(flat, like, real)


def drop_padding(hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The real slots of `[rows, slots, hidden_size]`, row after row, `[tokens, hidden_size]`. None: all are real."""
    return hidden.flatten(0, 1) if real is None else hidden[real.to(hidden.device)]


def restore_padding(flat: torch.Tensor, like: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `drop_padding`, in shape, dtype and device of `like`; padded slots are zero."""
    flat = flat.to(like.device, like.dtype)
    if real is None:
        return flat.view(like.shape)
    result = torch.zeros_like(like)
    result[real.to(like.device)] = flat
    return result
