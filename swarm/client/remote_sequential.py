"""The remote blocks as torch modules: the one layer inside the client's model, and `model.remote_blocks[a:b]`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarm.client.connection import SwarmConnection
from swarm.client.session import InferenceSession, pack_rows, unpack_rows
from swarm.data_structures import Span
from swarm.errors import InvalidSpan, SwarmError

FORWARD_TOKENS = 8192
"""Tokens in one request without a session; a larger batch is sent in several."""


class RemoteSequential(nn.Module):
    """Blocks `[start, end)` of the swarm as one module, without a session: nothing is kept between calls."""

    def __init__(self, connection: SwarmConnection, span: Span) -> None:
        super().__init__()
        self.span = span
        self._connection = connection

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Run whole sequences through the blocks.

        Args:
            hidden: `[rows, tokens, hidden_size]`.
            attention_mask: `[rows, tokens]`, 0 where a slot is padding.

        Returns:
            the blocks' outputs, same shape; zero where padded.
        """
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise SwarmError("gradients through remote blocks are not available yet; use torch.no_grad()")
        if hidden.ndim != 3:
            raise ValueError(f"hidden states are [rows, tokens, hidden_size], got {list(hidden.shape)}")
        real = None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.cpu().bool()
        return torch.cat([self._run(part, mask) for part, mask in _portions(hidden, real)])

    def _run(self, hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        rows, slots, _ = hidden.shape
        counts = [slots] * rows if real is None else real.sum(1).tolist()
        if not sum(counts):
            return torch.zeros_like(hidden)
        packed = pack_rows(hidden, real, self._connection)
        return unpack_rows(self._connection.forward(self.span, packed, counts), hidden, real)

    def __len__(self) -> int:
        return self.span.length

    def __getitem__(self, wanted: int | slice) -> RemoteSequential:
        """Some of the blocks: `remote_blocks[3:7]`, `remote_blocks[4]`."""
        if isinstance(wanted, slice):
            start, end, step = wanted.indices(len(self))
            if step != 1 or start >= end:
                raise InvalidSpan(f"[{wanted.start}:{wanted.stop}:{wanted.step}] is no contiguous range of blocks")
        else:
            start = range(len(self))[wanted]
            end = start + 1
        return RemoteSequential(self._connection, Span(self.span.start + start, self.span.start + end))

    def extra_repr(self) -> str:
        return f"blocks {self.span}"


def _portions(hidden: torch.Tensor, real: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    rows = max(1, FORWARD_TOKENS // max(1, hidden.shape[1]))
    for first in range(0, max(1, hidden.shape[0]), rows):
        yield hidden[first : first + rows], real[first : first + rows] if real is not None else None


@dataclass
class Call:
    """One forward of the client's model, seen by the layer in its middle."""

    session: InferenceSession | None
    mask: torch.Tensor | None
    tokens: torch.Tensor | None


class RemoteLayer(nn.Module):
    """Stands where the model has its decoder layers: all blocks of the swarm behind one layer's interface.

    The model's forward pre-hook says for each call what the layer cannot see: session, mask, token ids.
    """

    def __init__(self, blocks: RemoteSequential, outputs: int) -> None:
        super().__init__()
        self._blocks = [blocks]  # in a list: the blocks are no child of this model
        self._outputs = outputs
        self._local = threading.local()

    def expect(self, call: Call) -> None:
        """The next forward in this thread belongs to `call`."""
        self._local.call = call

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call: Call | None = getattr(self._local, "call", None)
        if call is None:
            raise SwarmError("the remote layer works inside its model only; use model.remote_blocks instead")
        self._local.call = None
        if call.session is not None:
            result = call.session.compute(hidden_states, call.mask, call.tokens)
        else:
            result = self._blocks[0](hidden_states, call.mask)
        # Families differ in what a layer returns: a tensor (0 outputs), or a tuple that begins with one.
        return (result,) + (None,) * (self._outputs - 1) if self._outputs else result
