"""Remote blocks in torch's graph, differentiable with respect to their inputs and to the adapter's tensors.

The client keeps the inputs of every hop, so the backward pass needs no activations from servers (Petals, section 2.2).
Servers keep nothing: a graph may be walked backward twice, later, or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.client.batches.hop_requests import HopGradients
from swarm.client.batches.passes import (
    ForwardTrace,
    MicroBatch,
    backward_batches,
    forward_batches,
    split_into_micro_batches,
)
from swarm.client.connection import SwarmConnection
from swarm.client.wire.adapter_upload import PackedAdapter, pack_adapter
from swarm.client.wire.packed_hidden import PaddedBatch, drop_padding, pack_hidden, restore_padding, unpack_hidden
from swarm.data_structures import Route, Span
from swarm.errors import SwarmError
from swarm.models.adapters.block_adapter import BlockAdapterWeights


def run_remotely(
    connection: SwarmConnection,
    span: Span,
    parts: Mapping[int, BlockAdapterWeights],
    hidden: torch.Tensor,
    batch: PaddedBatch,
) -> torch.Tensor:
    """Run whole sequences through blocks of servers.

    Args:
        parts: what is added to the blocks.
        hidden: `[sequences, slots, hidden_size]`.
        batch: which slots hold tokens.

    Returns:
        outputs of the same shape, dtype and device, zero where padded. They are differentiable with respect to `hidden`
        and the tensors of `parts`, if any of these requires gradients.
    """
    tensors = [tensor for part in parts.values() for tensor in part.tensors]
    computation = _RemoteComputation(connection, span, parts, pack_adapter(parts), batch)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *tensors)):
        output: torch.Tensor = _RemoteBlocksFunction.apply(computation, hidden, *tensors)
        return output
    return computation.forward(hidden, keep_inputs=False)[0]


class _RemoteBlocksFunction(torch.autograd.Function):
    """Blocks of servers as one function of hidden states and adapter tensors."""

    @staticmethod
    def forward(
        ctx: Any, computation: _RemoteComputation, hidden: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        output, ctx.traces = computation.forward(hidden, keep_inputs=True)
        ctx.computation = computation
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SwarmError("remote blocks do not support gradients of gradients; leave create_graph=True out")
        _, needs_hidden, *needs_tensors = ctx.needs_input_grad
        hidden, tensors = ctx.computation.backward(ctx.traces, gradients[0], needs_hidden, needs_tensors)
        return None, hidden, *tensors


@dataclass(frozen=True)
class _MicroBatchTrace:
    """Which sequences of the batch a micro-batch has, and the trace of its forward pass."""

    sequences: torch.Tensor
    trace: ForwardTrace


@dataclass(frozen=True)
class _RemoteComputation:
    """One forward pass of a batch through servers, and the backward passes that may follow."""

    connection: SwarmConnection
    span: Span
    parts: Mapping[int, BlockAdapterWeights]
    adapter: PackedAdapter
    batch: PaddedBatch

    def forward(self, hidden: torch.Tensor, keep_inputs: bool) -> tuple[torch.Tensor, list[_MicroBatchTrace]]:
        """The outputs, and the traces for a backward pass if `keep_inputs`."""
        result = torch.zeros_like(hidden)
        groups = self._micro_batches(hidden.shape[2])
        batches = [self._pack(hidden, sequences, route) for sequences, route in groups]
        context = self.connection.new_pass(self.adapter, keep_inputs)
        traces = self.connection.run(forward_batches(context, self.span, batches))
        for (sequences, _), trace in zip(groups, traces, strict=True):
            result[sequences] = unpack_hidden(trace.outputs, hidden[sequences], self.batch[sequences].real)
        return result, [
            _MicroBatchTrace(sequences, trace) for (sequences, _), trace in zip(groups, traces, strict=True)
        ]

    def backward(
        self,
        traces: Sequence[_MicroBatchTrace],
        gradient: torch.Tensor,
        needs_hidden: bool,
        needs_tensors: Sequence[bool],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The gradients of the hidden states and of the tensors of the parts, each None if it is not needed."""
        if not bool(gradient.isfinite().all()):
            return self._nan_gradients(gradient, needs_hidden, needs_tensors)
        output_gradients = [
            drop_padding(gradient[one.sequences], self.batch[one.sequences].real).float().cpu() for one in traces
        ]
        first = self.span.start if needs_hidden else self._first_trained_block(needs_tensors)
        context = self.connection.new_pass(self.adapter)
        found = self.connection.run(backward_batches(context, [one.trace for one in traces], output_gradients, first))
        hidden = torch.zeros_like(gradient) if needs_hidden else None
        if hidden is not None:
            for one, gradients in zip(traces, found, strict=True):
                real = self.batch[one.sequences].real
                hidden[one.sequences] = restore_padding(gradients.inputs, gradient[one.sequences], real)
        return hidden, _only_needed(self._sum_part_gradients(found), needs_tensors)

    def _micro_batches(self, hidden_size: int) -> list[tuple[torch.Tensor, Route]]:
        """The sequences of each micro-batch, and its route. Sequences without tokens are left out."""
        filled = [index for index, count in enumerate(self.batch.counts) if count]
        if not filled:
            return []
        values = sum(tensor.numel() for part in self.parts.values() for tensor in part.tensors)
        gradients_per_block = values / self.span.length / hidden_size
        groups = []
        for share in self.connection.split_batch(self.span, [self.batch.counts[index] for index in filled]):
            sequences = [filled[index] for index in share.sequences]
            servers = [hop.server for hop in share.route.hops]
            counts = [self.batch.counts[index] for index in sequences]
            for group in split_into_micro_batches(counts, servers, gradients_per_block):
                groups.append((torch.tensor([sequences[index] for index in group]), share.route))
        return groups

    def _pack(self, hidden: torch.Tensor, sequences: torch.Tensor, route: Route) -> MicroBatch:
        batch = self.batch[sequences]
        packed = pack_hidden(hidden[sequences], batch.real, self.connection.config.wire)
        return MicroBatch(packed, batch.layout, route)

    def _first_trained_block(self, needs_tensors: Sequence[bool]) -> int:
        """The first block with a tensor whose gradient is needed."""
        blocks = [block for block, part in self.parts.items() for _ in part.tensors]
        return min(block for block, needed in zip(blocks, needs_tensors, strict=True) if needed)

    def _sum_part_gradients(self, found: Sequence[HopGradients]) -> list[torch.Tensor]:
        """The gradients of all tensors of the parts, summed over the micro-batches.

        They are summed in the order of the micro-batches, so that the result does not depend on which finished first.
        """
        sums = []
        for block, part in self.parts.items():
            for number, tensor in enumerate(part.tensors):
                total = torch.zeros(tensor.shape)
                for gradients in found:
                    if block in gradients.parts:
                        total += gradients.parts[block][number]
                sums.append(total.to(tensor.device, tensor.dtype))
        return sums

    def _nan_gradients(
        self, gradient: torch.Tensor, needs_hidden: bool, needs_tensors: Sequence[bool]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """NaN for every gradient, if that of the outputs contains NaN or infinity, which servers refuse.

        Gradient scalers produce such gradients when a loss was scaled too far, and look for them here.
        """
        hidden = torch.full_like(gradient, torch.nan) if needs_hidden else None
        tensors = [tensor for part in self.parts.values() for tensor in part.tensors]
        return hidden, _only_needed([torch.full_like(tensor, torch.nan) for tensor in tensors], needs_tensors)


def _only_needed(gradients: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    return [gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True)]
