"""The blocks as torch modules: the one layer inside the client's model, and `model.remote_blocks[a:b]`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarm.client.autograd import run_remotely
from swarm.client.connection import SwarmConnection
from swarm.client.session import InferenceSession
from swarm.client.wire.adapter import Adapter, adapter_parts
from swarm.client.wire.padding import PaddedBatch
from swarm.data_structures import Span
from swarm.errors import InvalidSpan, SwarmError


class RemoteSequential(nn.Module):
    """Blocks `[start, end)` as one module, without a session: nothing is kept between calls.

    Those that the client holds itself are computed here, the others by the swarm. Gradients come back to the hidden
    states and to the tensors of the adapter, never to the blocks' own weights.
    """

    def __init__(self, connection: SwarmConnection, span: Span, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.span = span
        self._connection = connection
        self._tuning = _SharedAdapter(adapter)

    @property
    def adapter(self) -> Adapter | None:
        """What is added to the blocks; may be set at any time, for all slices of these blocks at once."""
        return self._tuning.adapter

    def __setattr__(self, name: str, value: Any) -> None:
        # An adapter may be a module itself, which torch would make a child of this one, past any property.
        if name == "adapter":
            self._tuning.adapter = value
        else:
            super().__setattr__(name, value)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run whole sequences through the blocks.

        Args:
            hidden: `[rows, tokens, hidden_size]`.
            attention_mask: `[rows, tokens]`, 0 where a slot is padding.
            position_ids: `[rows or 1, tokens]`; None counts each row's real tokens.

        Returns:
            the blocks' outputs, same shape; zero where padded. Differentiable once.
        """
        if hidden.ndim != 3:
            raise ValueError(f"hidden states are [rows, tokens, hidden_size], got {list(hidden.shape)}")
        real = None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.cpu().bool()
        if position_ids is not None:
            position_ids = position_ids.expand(hidden.shape[0], -1)
        counts = (hidden.shape[1],) * hidden.shape[0] if real is None else tuple(real.sum(1).tolist())
        return self._run(hidden, PaddedBatch(counts, real, position_ids))

    def _run(self, hidden: torch.Tensor, rows: PaddedBatch) -> torch.Tensor:
        parts = adapter_parts(self.adapter, self.span)
        local, end = self._connection.local, self.span.start
        if local is not None and local.span.end > self.span.start:
            end = min(self.span.end, local.span.end)
            hidden = local.forward(Span(self.span.start, end), hidden, rows, parts)
        if end == self.span.end:
            return hidden
        remote = {block: part for block, part in parts.items() if block >= end}
        return run_remotely(self._connection, Span(end, self.span.end), remote, hidden, rows)

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
        part = RemoteSequential(self._connection, Span(self.span.start + start, self.span.start + end))
        part._tuning = self._tuning
        return part

    def extra_repr(self) -> str:
        return f"blocks {self.span}"


@dataclass
class _SharedAdapter:
    """What all slices of the same blocks share."""

    adapter: Adapter | None


@dataclass
class ForwardCall:
    """One forward of the client's model, as the module around the remote layer was called.

    Attributes:
        session: the session that goes on, or None for a forward without one.
        mask: attention mask, or None.
        positions: position ids, or None if the caller gave none.
        positioned: whether the family takes position ids; it then counts slots where none are given.
        tokens: token ids, if the caller gave ids.
    """

    session: InferenceSession | None
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    positioned: bool
    tokens: torch.Tensor | None

    def told_positions(self, slots: int) -> torch.Tensor | None:
        """The positions that the family's layers would be told."""
        if self.positions is not None or not self.positioned or self.mask is None:
            return self.positions
        past = self.session.position if self.session is not None else 0
        return torch.arange(past, past + slots).unsqueeze(0)


class RemoteLayer(nn.Module):
    """Stands where the model has its decoder layers: all blocks of the swarm behind one layer's interface.

    The model's forward pre-hook says for each call what the layer cannot see: session, mask, token ids.
    """

    def __init__(self, blocks: RemoteSequential, outputs: int) -> None:
        super().__init__()
        self._blocks = [blocks]  # in a list: the blocks are no child of this model
        self._outputs = outputs
        self._local = threading.local()

    def expect(self, call: ForwardCall) -> None:
        """The next forward in this thread belongs to `call`."""
        self._local.call = call

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call: ForwardCall | None = getattr(self._local, "call", None)
        if call is None:
            raise SwarmError("the remote layer works inside its model only; use model.remote_blocks instead")
        self._local.call = None
        positions = call.told_positions(hidden_states.shape[1])
        if call.session is not None:
            result = call.session.compute(hidden_states, call.mask, positions, call.tokens)
        else:
            result = self._blocks[0](hidden_states, call.mask, positions)
        # Families differ in what a layer returns: a tensor (0 outputs), or a tuple that begins with one.
        return (result,) + (None,) * (self._outputs - 1) if self._outputs else result
