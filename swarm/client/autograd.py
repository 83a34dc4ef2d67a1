"""Remote blocks in torch's graph: their outputs know the way back to the inputs and to the adapter's tensors.

The client keeps what went into every hop, so the way back needs no activations from anybody (Petals, section 2.2).
Servers keep nothing: a graph may be walked backward twice, later, or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.client.batches.forward_pass import ForwardTrace, MicroBatch
from swarm.client.batches.gradient_packing import HopGradients
from swarm.client.batches.micro_batches import split_into_micro_batches
from swarm.client.connection import SwarmConnection
from swarm.client.wire.adapter_upload import PackedAdapter, pack_adapter
from swarm.client.wire.padding import PaddedBatch, drop_padding, pack_hidden, restore_padding, unpack_hidden
from swarm.data_structures import Route, Span
from swarm.errors import SwarmError
from swarm.protocol.adapter_encoding import BlockAdapterWeights


def run_remotely(
    connection: SwarmConnection,
    span: Span,
    parts: Mapping[int, BlockAdapterWeights],
    hidden: torch.Tensor,
    rows: PaddedBatch,
) -> torch.Tensor:
    """Whole sequences through blocks that servers hold.

    Args:
        parts: what is added to blocks.
        hidden: `[rows, slots, hidden_size]`.

    Returns:
        outputs of the same shape, dtype and device, zero where padded; differentiable with respect to `hidden` and to
        the tensors of `parts` if any of them requires gradients.
    """
    tensors = [tensor for part in parts.values() for tensor in part.tensors]
    trip = _RemoteForward(connection, span, parts, pack_adapter(parts), rows)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *tensors)):
        output: torch.Tensor = _RemoteBlocksFunction.apply(trip, hidden, *tensors)
        return output
    return trip.forward(hidden, keeps=False)[0]


class _RemoteBlocksFunction(torch.autograd.Function):
    """Blocks of servers as one function of hidden states and adapter tensors."""

    @staticmethod
    def forward(ctx: Any, trip: _RemoteForward, hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        output, ctx.ways = trip.forward(hidden, keeps=True)
        ctx.trip = trip
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SwarmError("gradients of gradients do not come through remote blocks; leave create_graph=True out")
        _, wants_hidden, *wants = ctx.needs_input_grad
        hidden, tensors = ctx.trip.backward(ctx.ways, gradients[0], wants_hidden, wants)
        return None, hidden, *tensors


@dataclass(frozen=True)
class _SequencesTrace:
    """Rows of one micro-batch, and the way that they took."""

    rows: torch.Tensor
    passage: ForwardTrace


@dataclass(frozen=True)
class _RemoteForward:
    """One forward pass of a batch, and the backward passes that follow it."""

    connection: SwarmConnection
    span: Span
    parts: Mapping[int, BlockAdapterWeights]
    adapter: PackedAdapter
    rows: PaddedBatch

    def forward(self, hidden: torch.Tensor, keeps: bool) -> tuple[torch.Tensor, list[_SequencesTrace]]:
        """The outputs, and what is needed on the way back, if that is to be kept."""
        result = torch.zeros_like(hidden)
        planned = self._planned(hidden.shape[2])
        batches = [self._packed(hidden, rows, route) for rows, route in planned]
        passages = self.connection.forward(self.span, batches, self.adapter, keeps)
        for (rows, _), passage in zip(planned, passages, strict=True):
            result[rows] = unpack_hidden(passage.outputs, hidden[rows], self.rows[rows].real)
        return result, [_SequencesTrace(rows, passage) for (rows, _), passage in zip(planned, passages, strict=True)]

    def backward(
        self, ways: Sequence[_SequencesTrace], gradient: torch.Tensor, wants_hidden: bool, wants: Sequence[bool]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The gradients of the hidden states and of the tensors of the parts, where they are wanted."""
        if not bool(gradient.isfinite().all()):
            return self._unknown(gradient, wants_hidden, wants)
        ends = [drop_padding(gradient[way.rows], self.rows[way.rows].real).float().cpu() for way in ways]
        first = self.span.start if wants_hidden else self._first_wanted(wants)
        found = self.connection.backward([way.passage for way in ways], ends, self.adapter, first)
        hidden = torch.zeros_like(gradient) if wants_hidden else None
        if hidden is not None:
            for way, one in zip(ways, found, strict=True):
                hidden[way.rows] = restore_padding(one.inputs, gradient[way.rows], self.rows[way.rows].real)
        return hidden, [tensor if want else None for tensor, want in zip(self._summed(found), wants, strict=True)]

    def _planned(self, hidden_size: int) -> list[tuple[torch.Tensor, Route]]:
        """Rows that go together, and by which route; rows without tokens go nowhere."""
        filled = [row for row, count in enumerate(self.rows.counts) if count]
        values = sum(tensor.numel() for part in self.parts.values() for tensor in part.tensors)
        planned = []
        for portion in self.connection.split(self.span, [self.rows.counts[row] for row in filled]) if filled else ():
            mine = [filled[row] for row in portion.sequences]
            servers = [hop.server for hop in portion.route.hops]
            counts = [self.rows.counts[row] for row in mine]
            for group in split_into_micro_batches(counts, servers, values / self.span.length / hidden_size):
                planned.append((torch.tensor([mine[row] for row in group]), portion.route))
        return planned

    def _packed(self, hidden: torch.Tensor, index: torch.Tensor, route: Route) -> MicroBatch:
        rows = self.rows[index]
        packed = pack_hidden(hidden[index], rows.real, self.connection.config.wire)
        return MicroBatch(packed, rows.layout, route)

    def _first_wanted(self, wants: Sequence[bool]) -> int:
        """The first block of whose part a gradient is wanted."""
        blocks = [block for block, part in self.parts.items() for _ in part.tensors]
        return min(block for block, want in zip(blocks, wants, strict=True) if want)

    def _summed(self, found: Sequence[HopGradients]) -> list[torch.Tensor]:
        """The gradients of all tensors of the parts, over all micro-batches in their order, so that they are the same
        whichever of them came first."""
        sums = []
        for block, part in self.parts.items():
            for number, tensor in enumerate(part.tensors):
                total = torch.zeros(tensor.shape)
                for one in found:
                    if block in one.parts:
                        total += one.parts[block][number]
                sums.append(total.to(tensor.device, tensor.dtype))
        return sums

    def _unknown(
        self, gradient: torch.Tensor, wants_hidden: bool, wants: Sequence[bool]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """What comes of NaN and infinity, which servers take from nobody: a loss that was scaled too far has them, and
        whoever scaled it looks for them."""
        hidden = torch.full_like(gradient, torch.nan) if wants_hidden else None
        tensors = [tensor for part in self.parts.values() for tensor in part.tensors]
        unknown = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        return hidden, [tensor if want else None for tensor, want in zip(unknown, wants, strict=True)]
