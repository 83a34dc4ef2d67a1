"""`with model.inference_session(max_length=...) as session`: one open generation on the swarm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from swarm.client.chain.chain import Chain
from swarm.client.chain.input_history import REQUEST_TOKENS
from swarm.client.chain.prompt_chunks import chunk_slots
from swarm.client.connection import SwarmConnection
from swarm.client.local_blocks import LocalSession
from swarm.client.routes.events import EventListener
from swarm.client.wire.adapter import adapter_parts, detach_parts
from swarm.client.wire.adapter_upload import pack_adapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.padding import pack_hidden, position_offsets, unpack_hidden
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import SessionClosed, TooLong
from swarm.models.placeholder_cache import PlaceholderCache


class InferenceSession:
    """The servers of a route keep this session's attention keys and values; the client keeps its place, and a record of
    what it sent, with which a server that vanishes is replaced by another one.

    What the model's adapter adds to the blocks stays as it is when the session's route is found, with the first step.

    A session is used by one thread at a time. `generate` within the `with` block uses it by itself.

    Args:
        model: the distributed model.
        connection: its connection to the swarm.
        max_length: tokens that each row may have at most; servers reserve room for them.
        listener: hears of what happens to the session on its way, see `swarm.client.routes.events`.
    """

    def __init__(
        self, model: Any, connection: SwarmConnection, max_length: int, listener: EventListener | None = None
    ) -> None:
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; a session needs room for at least one token")
        self.max_length = max_length
        self.cache = PlaceholderCache(self)
        self._listener = listener
        self._model = model
        self._connection = connection
        self._chain: Chain | None = None
        self._local: LocalSession | None = None
        self._closed = False

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the next tokens through all blocks and the family's final norm.

        Args:
            hidden: `[rows, tokens, hidden_size]` from `model.word_embeddings`, any number of tokens.

        Returns:
            final representations of the same shape, ready for `model.lm_head`.
        """
        with torch.inference_mode():
            output = self._model.base_model(inputs_embeds=hidden, past_key_values=self.cache, use_cache=True)
        final: torch.Tensor = output.last_hidden_state
        return final

    @property
    def position(self) -> int:
        """Tokens computed so far, the same for all rows. Set it back to take tokens back."""
        return self.cache.length

    @position.setter
    def position(self, position: int) -> None:
        self.cache.set_length(position)

    @property
    def route(self) -> Route | None:
        """The servers in use, once the first step was made."""
        return self._chain.route if self._chain is not None and self._chain.is_open else None

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Where the time of the last step went: in this client's own blocks if it has any, then at each server."""
        here = (self._local.timing,) if self._local is not None and self._local.timing is not None else ()
        return here + (self._chain.timings if self._chain is not None else ())

    def compute(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the hidden states of new slots through the remote blocks and remember them.

        Args:
            hidden: `[rows, new, hidden_size]`.
            mask: attention mask `[rows, position + new]`, or None if nothing is padded.
            positions: position ids `[rows or 1, new]` that the model is told, or None if it takes none.
            tokens: ids `[rows, new]`, if known.
        """
        if self._closed:
            raise SessionClosed("this inference session is closed; open another one")
        rows, new, _ = hidden.shape
        layout, fresh = self.cache.layout(rows, new, mask)
        longest = max(start + count for start, count in zip(layout.starts, layout.counts, strict=True))
        if longest > self.max_length:
            raise TooLong(
                f"the session would be {longest} tokens long; it was opened with max_length={self.max_length}"
            )
        size = max(1, REQUEST_TOKENS // rows)
        if layout.tokens:
            chain = self._opened()
            alone = not chain.appends(layout)  # what copies rows or sets them back has to be done everywhere at first
            chunk = chunk_slots(new, rows, [hop.server for hop in chain.route.hops], alone)
            if chunk < new and alone:
                size = chunk
        if new > size:
            return self._compute_in_parts(hidden, mask, positions, tokens, size)
        result = hidden
        if layout.tokens:
            result = self._compute_chunks(hidden, layout, fresh, positions, chunk)
        self.cache.commit(rows, new, fresh, tokens)
        return result

    def open(self) -> Route:
        """Find a route and reserve room on its servers now, instead of at the first step."""
        return self._opened().route

    def resume(self) -> Route:
        """Go on after servers came back: replace those that were lost, now instead of at the next step.

        After `MissingBlocks` the session still knows everything up to the last step that succeeded.
        """
        chain = self._opened()
        self._connection.resume_chain(chain)
        return chain.route

    def _compute_in_parts(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        tokens: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        """`compute` of the first `size` slots, and then of the rest."""
        past = self.position
        parts = []
        for part in (slice(0, size), slice(size, hidden.shape[1])):
            parts.append(
                self.compute(
                    hidden[:, part],
                    mask[:, : past + part.stop] if mask is not None else None,
                    positions[:, part] if positions is not None else None,
                    tokens[:, part] if tokens is not None else None,
                )
            )
        return torch.cat(parts, dim=1)

    def _compute_chunks(
        self,
        hidden: torch.Tensor,
        layout: StepLayout,
        fresh: torch.Tensor | None,
        positions: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        """The blocks' outputs; chunks of `size` slots follow each other through the chain."""
        cut = list(split_step(layout, fresh, positions, hidden.shape[1], size))
        parts = []
        for slots, of_slots, real in cut:
            inputs = hidden[:, slots]
            if self._local is not None:
                inputs = self._local.compute(inputs, real, of_slots)
            parts.append((pack_hidden(inputs, real, self._connection.config.wire), of_slots))
        outputs = self._send(parts)
        if self._local is not None:
            self._local.confirm()
        if len(cut) == 1 and cut[0][0] == slice(0, hidden.shape[1]):
            return unpack_hidden(outputs[0], hidden, fresh)
        result = torch.zeros_like(hidden)
        for (slots, _, real), output in zip(cut, outputs, strict=True):
            result[:, slots] = unpack_hidden(output, hidden[:, slots], real)
        return result

    def _send(self, parts: Sequence[tuple[PackedHidden, StepLayout]]) -> list[PackedHidden]:
        return self._connection.steps(self._opened(), parts)

    def _opened(self) -> Chain:
        if self._closed:
            raise SessionClosed("this inference session is closed; open another one")
        if self._chain is None or not self._chain.is_open:
            self._free()
            parts = adapter_parts(self._model.remote_blocks.adapter, Span(0, self._connection.blocks))
            remote = {block: part for block, part in parts.items() if block in self._connection.span}
            if self._connection.local is not None:
                self._local = self._connection.local.session(detach_parts(parts))
            # Known before it is open, so that it is closed even if somebody interrupts in the moment when it is.
            self._chain = self._connection.new_chain(self.max_length, pack_adapter(remote), self._listener)
            self._connection.open_chain(self._chain)
        return self._chain

    def close(self) -> None:
        """Free the session on all servers. A closed session cannot be used again."""
        self._closed = True
        self._free()
        self._local = None

    def _free(self) -> None:
        if self._chain is not None:
            chain, self._chain = self._chain, None
            self._connection.close_chain(chain)

    def __enter__(self) -> InferenceSession:
        self._model.enter_session(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._model.leave_session(self)
        self.close()


def split_step(
    layout: StepLayout, fresh: torch.Tensor | None, positions: torch.Tensor | None, slots: int, size: int
) -> Iterator[tuple[slice, StepLayout, torch.Tensor | None]]:
    """A step, `size` slots at a time: which slots, their layout, and which of them are real `[rows, size]` (None: all).

    Where all slots are padding nothing is sent. For `fresh` and `positions` see `InferenceSession.compute`.
    """
    starts, sources = layout.starts, layout.sources
    for first in range(0, slots, size):
        part = slice(first, min(first + size, slots))
        real = fresh[:, part] if fresh is not None else None
        real = None if real is None or bool(real.all()) else real
        counts = (part.stop - first,) * layout.sequences if real is None else tuple(real.sum(1).tolist())
        if not any(counts):
            continue
        plain = StepLayout(starts, counts, sources)
        offsets = position_offsets(positions[:, part] if positions is not None else None, real, plain)
        yield part, replace(plain, offsets=offsets), real
        starts, sources = tuple(start + count for start, count in zip(starts, counts, strict=True)), None
