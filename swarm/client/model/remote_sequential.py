"""The remote blocks as torch modules: `RemoteLayer` inside the client's model, and `model.remote_blocks[a:b]`.

How a forward of the model reaches the swarm: transformers calls the module that owns the decoder layers, whose list of
layers holds a single one, the `RemoteLayer`. A layer gets hidden states only. A session also needs the mask, the
position ids and the token ids, which only the owner sees. So the owner's forward pre-hook (`ForwardHooks`) stores them
in a `ForwardCall` just before, and the layer takes it:

    model.forward -> owner's pre-hook: layer.prepare(ForwardCall(...)) -> owner.forward -> RemoteLayer.forward
        -> with a session: InferenceSession.compute -> Chain.steps
        -> without:        RemoteSequential.forward -> run_remotely
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from swarm.client.connection import SwarmConnection
from swarm.client.model.autograd import run_remotely
from swarm.client.session import InferenceSession, StepUnderWay
from swarm.client.wire.adapter_upload import Adapter, adapter_parts
from swarm.client.wire.packed_hidden import PaddedBatch, drop_padding, packed_texts
from swarm.data_structures import Span
from swarm.errors import InvalidSpan, SwarmError
from swarm.protocol.messages import ExitTerms


class RemoteSequential(nn.Module):
    """Blocks `[start, end)` as one module without a session: nothing is kept between calls.

    The client computes its own blocks here, servers compute the others. Gradients flow to the hidden states and to the
    tensors of the adapter, never to the weights of the blocks.
    """

    def __init__(self, connection: SwarmConnection, span: Span) -> None:
        super().__init__()
        self.span = span
        self._connection = connection
        self._shared: list[Adapter | None] = [None]  # by all slices of these blocks

    @property
    def adapter(self) -> Adapter | None:
        """What is added to the blocks; may be set at any time, for all slices of these blocks at once."""
        return self._shared[0]

    def __setattr__(self, name: str, value: Any) -> None:
        # torch would register an adapter that is a module as a child of this one, and bypass any property setter.
        if name == "adapter":
            self._shared[0] = value
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
            hidden: `[sequences, tokens, hidden_size]`.
            attention_mask: `[sequences, tokens]`, 0 where a slot is padding.
            position_ids: `[sequences or 1, tokens]`; None counts the tokens of each sequence. Without a mask, a new
                text begins where they do not count on, and sees none of the texts before it, as in transformers.

        Returns:
            the blocks' outputs, same shape; zero where padded. Differentiable once.

        Raises:
            UsageError: with a mask, the position ids of a sequence do not count on.
        """
        if hidden.ndim != 3:
            raise ValueError(f"hidden states have the shape [rows, tokens, hidden_size], not {list(hidden.shape)}")
        real = None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.cpu().bool()
        if position_ids is not None:
            position_ids = position_ids.expand(hidden.shape[0], -1)
            lengths = packed_texts(position_ids) if attention_mask is None else None
            if lengths is not None:
                return self._run_packed(hidden, position_ids, lengths)
        counts = (hidden.shape[1],) * hidden.shape[0] if real is None else tuple(real.sum(1).tolist())
        return self._run(hidden, PaddedBatch(counts, real, position_ids))

    def _run_packed(self, hidden: torch.Tensor, positions: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """`forward` for rows of several texts, given how long these are: each becomes a row of its own."""
        texts = pad_sequence(hidden.flatten(0, 1).split(lengths), batch_first=True)
        ids = pad_sequence(positions.flatten().split(lengths), batch_first=True)
        real = torch.arange(texts.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        output = self._run(texts, PaddedBatch(tuple(lengths), real, ids))
        return drop_padding(output, real).view(hidden.shape)

    def _run(self, hidden: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        parts = adapter_parts(self.adapter, self.span)
        local, local_end = self._connection.local, self.span.start
        if local is not None and local.span.end > self.span.start:
            local_end = min(self.span.end, local.span.end)
            hidden = local.forward(Span(self.span.start, local_end), hidden, batch, parts)
        if local_end == self.span.end:
            return hidden
        remote_parts = {block: part for block, part in parts.items() if block >= local_end}
        return run_remotely(self._connection, Span(local_end, self.span.end), remote_parts, hidden, batch)

    def __len__(self) -> int:
        return self.span.length

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        """Some of the blocks: `remote_blocks[3:7]`, `remote_blocks[4]`."""
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1 or start >= end:
                raise InvalidSpan(f"[{index.start}:{index.stop}:{index.step}] is not a contiguous range of blocks")
        else:
            start = range(len(self))[index]
            end = start + 1
        part = RemoteSequential(self._connection, Span(self.span.start + start, self.span.start + end))
        part._shared = self._shared
        return part

    def extra_repr(self) -> str:
        return f"blocks {self.span}"


@dataclass
class ForwardCall:
    """What the remote layer has to know of one forward call, and does not get as an argument.

    Attributes:
        session: the session that is continued, or None.
        mask: attention mask, or None.
        positions: position ids of the caller, or None.
        takes_positions: whether the family takes position ids; if none are given it counts slots.
        tokens: token ids of the caller, or None.
    """

    session: InferenceSession | None
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    takes_positions: bool
    tokens: torch.Tensor | None

    def layer_positions(self, slots: int) -> torch.Tensor | None:
        """The position ids that the family's own layers would get."""
        if self.positions is not None or not self.takes_positions or self.mask is None:
            return self.positions
        past = self.session.position if self.session is not None else 0
        return torch.arange(past, past + slots).unsqueeze(0)


class StepSent(Exception):
    """Ends a forward whose step was sent off: what is behind the blocks cannot be computed yet.

    Attributes:
        step: the step.
    """

    def __init__(self, step: StepUnderWay) -> None:
        super().__init__(step.number)
        self.step = step


class RemoteLayer(nn.Module):
    """Takes the place of the model's decoder layers: all blocks of the swarm behind the interface of one layer."""

    def __init__(self, blocks: RemoteSequential, outputs: int) -> None:
        super().__init__()
        self._blocks = [blocks]  # in a list, so that torch does not make the blocks a child of the model
        self._outputs = outputs
        self._local = threading.local()

    def prepare(self, call: ForwardCall) -> None:
        """Store the call to which the next forward in this thread belongs."""
        self._local.call = call

    @contextmanager
    def sending(self, exits: ExitTerms | None = None, exit_block: int | None = None) -> Iterator[None]:
        """Meanwhile, forwards of this thread send their step off and end with `StepSent`.

        Args:
            exits, exit_block: where the step's tokens may leave; see `InferenceSession.begin`.
        """
        self._local.sends, self._local.exits = True, (exits, exit_block)
        try:
            yield
        finally:
            self._local.sends = False

    @contextmanager
    def replaced(self, blocks: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Meanwhile, forwards of this thread have `blocks` compute, from hidden states to hidden states."""
        self._local.blocks = blocks
        try:
            yield
        finally:
            self._local.blocks = None

    @contextmanager
    def heard(self, listener: Callable[[torch.Tensor], object]) -> Iterator[None]:
        """Meanwhile, `listener` is handed what the blocks answer to forwards of this thread."""
        self._local.listener = listener
        try:
            yield
        finally:
            self._local.listener = None

    @property
    def is_replaced(self) -> bool:
        """Whether something else computes the blocks of this thread's forwards, so that no call belongs to them."""
        return getattr(self._local, "blocks", None) is not None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result: torch.Tensor = (self._local.blocks if self.is_replaced else self._compute)(hidden_states)
        if (listener := getattr(self._local, "listener", None)) is not None:
            listener(result)
        # The layers of a family return a tensor (0 outputs), or a tuple that begins with one.
        return (result,) + (None,) * (self._outputs - 1) if self._outputs else result

    def _compute(self, hidden: torch.Tensor) -> torch.Tensor:
        call: ForwardCall | None = getattr(self._local, "call", None)
        if call is None:
            raise SwarmError("the remote layer works only inside its model; use model.remote_blocks instead")
        self._local.call = None
        positions = call.layer_positions(hidden.shape[1])
        if call.session is None:
            result: torch.Tensor = self._blocks[0](hidden, call.mask, positions)
            return result
        if getattr(self._local, "sends", False):
            step = call.session.begin(hidden, call.mask, positions, call.tokens, *self._local.exits)
            raise StepSent(step)
        return call.session.compute(hidden, call.mask, positions, call.tokens)
