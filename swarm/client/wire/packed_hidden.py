"""Padded batches `[sequences, slots]`, as transformers has them, and packed tokens without padding, as they travel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from swarm.common.dtypes import dtype_name
from swarm.common.large_payloads import run_large
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import NotFinite, UsageError
from swarm.protocol.compression import decode_tensor, encode_tensor, is_finite

MAX_REQUEST_TOKENS = 8192
"""Tokens in one request. Longer prompts, larger batches and longer replays are sent in several requests."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PackedHidden:
    """Hidden states `[tokens, hidden_size]` encoded for the wire.

    Attributes:
        left: for each sequence, the block in front of which its token has left a server's span (0: it has not); None if
            no token has. The hidden states of a token that left are those in front of that block.
    """

    payload: bytes | memoryview
    tokens: int
    hidden_size: int
    wire: WireFormat
    dtype: str
    left: tuple[int, ...] | None = None

    @classmethod
    def of(cls, hidden_TH: torch.Tensor, wire: WireFormat, dtype: str | None = None) -> PackedHidden:
        """Encode hidden states `[tokens, hidden_size]`. `dtype` is that of the wire format NONE, if not their own."""
        tokens, hidden_size = hidden_TH.shape
        return cls(encode_tensor(hidden_TH, wire), tokens, hidden_size, wire, dtype or dtype_name(hidden_TH.dtype))

    def decoded(self, device: torch.device = _CPU) -> torch.Tensor:
        """The hidden states, `[tokens, hidden_size]`."""
        return decode_tensor(self.payload, self.tokens, self.hidden_size, self.wire, self.dtype, device)

    async def require_finite(self) -> None:
        """Raise `NotFinite` if a value is NaN or infinite, which every server would refuse."""
        values, payload = self.tokens * self.hidden_size, self.payload
        if not await run_large(len(payload), is_finite, payload, values, self.wire, self.dtype):
            raise NotFinite("the hidden states to be sent contain NaN or infinity; check the inputs of the model")


@dataclass(frozen=True)
class PaddedBatch:
    """Which slots of a batch `[sequences, slots]` hold tokens, and the positions of these tokens.

    Attributes:
        counts: tokens of each sequence.
        real: mask of the slots that hold tokens, on the CPU; None if no slot is padding.
        positions: the position ids that the model's layers get, or None.
    """

    counts: tuple[int, ...]
    real: torch.Tensor | None
    positions: torch.Tensor | None

    def __getitem__(self, sequences: torch.Tensor | slice) -> PaddedBatch:
        """Some of the sequences."""
        index = torch.arange(len(self.counts))[sequences]
        counts = tuple(self.counts[row] for row in index.tolist())
        real = self.real[index] if self.real is not None else None
        return PaddedBatch(counts, real, self.positions[index] if self.positions is not None else None)

    @property
    def layout(self) -> StepLayout:
        """The layout of a step that brings the whole sequences."""
        layout = StepLayout((0,) * len(self.counts), self.counts)
        layout = replace(layout, offsets=position_offsets(self.positions, self.real, layout))
        return replace(layout, rope_lengths=layout.ends)


def position_offsets(
    positions: torch.Tensor | None, real: torch.Tensor | None, layout: StepLayout
) -> tuple[int, ...] | None:
    """The difference between each sequence's position ids and the count of its tokens; None if all are zero.

    Args:
        positions: `[sequences or 1, slots]`, or None.
        real: mask of the slots that hold tokens `[sequences, slots]`; None if no slot is padding.

    Raises:
        UsageError: the ids of a sequence do not count on from one to the next, or begin below the count of its tokens.
    """
    if positions is None or not layout.tokens:
        return None
    if positions.ndim != 2:
        raise UsageError(f"position_ids have the shape [rows, tokens] in a swarm, not {list(positions.shape)}")
    positions = positions.expand(layout.sequences, -1).cpu()
    if real is None and positions.shape[1] == 1:  # a token of each sequence: most steps, and tensors take 0.1 ms more
        single = tuple(one - start for one, start in zip(positions[:, 0].tolist(), layout.starts, strict=True))
        if min(single) >= 0:
            return single if any(single) else None
    real = real if real is not None else torch.ones_like(positions, dtype=torch.bool)
    # What the ids are ahead of the count of tokens: the same for all tokens of a sequence.
    ahead = positions - (torch.tensor(layout.starts).unsqueeze(1) + real.cumsum(1) - 1)
    first = ahead.gather(1, real.long().argmax(1, keepdim=True))
    wrong = (real & ((ahead != first) | (ahead < 0))).any(1)
    if bool(wrong.any()):
        row = int(wrong.long().argmax())
        ids, start = positions[row][real[row]].tolist(), layout.starts[row]
        shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
        raise UsageError(
            f"position_ids of row {row} are [{shown}] for its tokens from number {start} on; servers compute only "
            "positions that count on from one token to the next, and from no less than the number of tokens before. "
            "Leave position_ids out, or pass several texts in a row, whose ids begin again (as from "
            "DataCollatorWithFlattening), without attention_mask and without a session"
        )
    offsets = tuple(torch.where(real.any(1), first[:, 0], 0).tolist())
    return offsets if any(offsets) else None


def packed_texts(positions: torch.Tensor) -> list[int] | None:
    """The lengths of the texts in rows of position ids, one row after the other; None if each row is one text.

    As in transformers, a text ends where the ids do not count on from one to the next.

    Args:
        positions: `[rows, tokens]`.
    """
    rows, tokens = positions.shape
    begins = torch.ones(rows, tokens, dtype=torch.bool)
    begins[:, 1:] = (positions[:, 1:] - positions[:, :-1] != 1).cpu()
    if int(begins.sum()) == rows:
        return None
    bounds = [*begins.flatten().nonzero().flatten().tolist(), rows * tokens]
    return [end - first for first, end in itertools.pairwise(bounds)]


def pack_hidden(hidden: torch.Tensor, real: torch.Tensor | None, wire: WireFormat) -> PackedHidden:
    """Encode the real slots of `[sequences, slots, hidden_size]` for the wire, one sequence after the other."""
    return PackedHidden.of(drop_padding(hidden, real), wire)


def unpack_hidden(packed: PackedHidden, like: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `pack_hidden`, with the shape, dtype and device of `like`; padded slots are zero."""
    return restore_padding(packed.decoded(like.device), like, real)


def unpack_chunks(
    outputs: Sequence[PackedHidden],
    chunks: Sequence[tuple[slice, StepLayout, torch.Tensor | None]],
    like: torch.Tensor,
) -> torch.Tensor:
    """The outputs of the chunks of one step, see `split_step`, like the hidden states `[sequences, slots, H]` that went
    in; zero where padded."""
    slots, _, real = chunks[0]
    if len(chunks) == 1 and slots == slice(0, like.shape[1]):
        return unpack_hidden(outputs[0], like, real)
    result = torch.zeros_like(like)
    for (slots, _, real), output in zip(chunks, outputs, strict=True):
        result[:, slots] = unpack_hidden(output, like[:, slots], real)
    return result


def drop_padding(hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The real slots of `[sequences, slots, hidden_size]` as `[tokens, hidden_size]`, one sequence after the other."""
    return hidden.flatten(0, 1) if real is None else hidden[real.to(hidden.device)]


def restore_padding(flat: torch.Tensor, like: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `drop_padding`, with the shape, dtype and device of `like`; padded slots are zero."""
    flat = flat.to(like.device, like.dtype)
    if real is None:
        return flat.view(like.shape)
    result = torch.zeros_like(like)
    result[real.to(like.device)] = flat
    return result


def split_step(
    layout: StepLayout, real: torch.Tensor | None, slots: int, size: int
) -> Iterator[tuple[slice, StepLayout, torch.Tensor | None]]:
    """Cut a step into chunks of `size` slots; a chunk of nothing but padding is left out.

    Args:
        layout: the layout of the whole step.
        real: mask of the slots that hold tokens; None if no slot is padding.
        slots: number of slots of the step.

    Yields:
        the slots of each chunk, its layout, and the mask of its slots that hold tokens.
    """
    if slots <= size:
        yield slice(0, slots), layout, real
        return
    starts, sources = layout.starts, layout.sources
    for first in range(0, slots, size):
        part = slice(first, min(first + size, slots))
        part_real = real[:, part] if real is not None else None
        part_real = None if part_real is None or bool(part_real.all()) else part_real
        counts = (part.stop - first,) * layout.sequences if part_real is None else tuple(part_real.sum(1).tolist())
        if not any(counts):
            continue
        yield part, replace(layout, starts=starts, counts=counts, sources=sources), part_real
        starts, sources = tuple(start + count for start, count in zip(starts, counts, strict=True)), None
