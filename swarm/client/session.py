"""`with model.inference_session(max_length=...) as session`: one open generation on the swarm.

The model's forward calls `InferenceSession.compute` through `RemoteLayer`. From there the way of a step is one way: the
session cuts it into chunks and encodes them, its `Chain` sends them through the servers of the route in the network
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm.client.chain.chain import Chain
from swarm.client.chain.prefix import AdapterDigests, Prefix, PrefixSource, prefix_source
from swarm.client.chain.prompt_chunks import chunk_slots
from swarm.client.connection import SwarmConnection
from swarm.client.early_exit.options import EarlyExit
from swarm.client.local_blocks import LocalSession
from swarm.client.routes.events import EventListener, SessionEvent
from swarm.client.wire.adapter_upload import adapter_parts, detach_parts, pack_adapter
from swarm.client.wire.packed_hidden import (
    MAX_REQUEST_TOKENS,
    pack_hidden,
    position_offsets,
    split_step,
    unpack_chunks,
    unpack_hidden,
)
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import SessionClosed, TooLong, UsageError
from swarm.models.placeholder_cache import PlaceholderCache
from swarm.models.rope_lengths import rope_limit
from swarm.protocol.messages import ExitTerms, Receipt


@dataclass(frozen=True)
class StepUnderWay:
    """A step that was sent off without waiting for what becomes of it, and is not settled.

    Attributes:
        number: its number in the session.
        before: slots of each sequence before it.
        hidden: what went into the blocks, `[sequences, slots, hidden_size]`.
        real: mask of the slots that hold tokens; None if all do.
    """

    number: int
    before: int
    hidden: torch.Tensor
    real: torch.Tensor | None


class InferenceSession:
    """One generation. Servers hold its keys and values; the client holds its position and a history of its inputs.

    The history refills the caches of a server that replaces a lost one. What the model's adapter adds to the blocks is
    fixed when the route is found, at the first step. A session is used by one thread at a time, and by `generate`
    inside its `with` block.

    Args:
        model: the distributed model.
        connection: the model's connection to the swarm.
        max_length: maximum number of tokens of each sequence; servers reserve cache space for them.
        listener: receives the events of the session; see `swarm.client.routes.events`.
        keep_receipts: get the receipt of each server that is left, too, and of all at the end; see `receipts`.

    Attributes:
        cache: the session as transformers sees it.
        early_exit: when tokens leave early in `generate` calls that do not say; None for never.
        rope_limit: how long texts are whose rotary frequencies do not depend on their length; None for any length.
        grows: whether `max_length` is only where to begin. A longer session is opened when a step needs one.
        begun: with how many tokens of an earlier session it began; see `begin_with`.
        text_length: of a text that comes in several forwards, for frequencies as if it came in one; 0 to count.
        room_timeout: seconds for which opening the session waits for room at its servers before it raises `CacheFull`,
            for callers that try again. None to wait as for lost servers, and to avoid full ones for a while.
    """

    def __init__(
        self,
        model: Any,
        connection: SwarmConnection,
        max_length: int,
        listener: EventListener | None = None,
        keep_receipts: bool = False,
    ) -> None:
        self._kept_receipts: dict[bytes, Receipt] | None = {} if keep_receipts else None
        self._chain: Chain | None = None
        if max_length < 1:
            raise ValueError(f"max_length={max_length} is not valid: a session needs space for at least one token")
        self.max_length = max_length
        self.cache = PlaceholderCache(self)
        self.early_exit: EarlyExit | None = None
        self._listener = listener
        self._model = model
        self.rope_limit = rope_limit(model.config)
        self.text_length = 0
        self.room_timeout: float | None = None
        self.grows = False
        self.begun = 0
        self._began_with: PrefixSource | None = None
        self._digests: AdapterDigests = (None, None)
        self._connection = connection
        self._local: LocalSession | None = None
        self._early_exits = False
        self._closed = False

    def prepare_for(self, options: EarlyExit) -> None:
        """Have the session opened such that tokens can leave as `options` say: only then are servers told that tokens
        may leave inside their spans, which is approximate.

        Raises:
            UsageError: the session was opened otherwise, and has computed tokens.
        """
        if options.fill == "exact" or self._early_exits:
            return
        if self._chain is not None and self._chain.is_open:
            if self.position:
                raise UsageError(
                    "early_exit with fill='project' is agreed with servers when a session opens, and this session has "
                    "computed tokens without; pass early_exit to inference_session as well, or use another session"
                )
            self._close_chain()
        self._early_exits = True

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the next tokens through all blocks and the family's final norm.

        Args:
            hidden: `[sequences, tokens, hidden_size]` from `model.word_embeddings`, any number of tokens.

        Returns:
            final hidden states of the same shape, ready for `model.lm_head`.
        """
        with torch.inference_mode():
            output = self._model.base_model(inputs_embeds=hidden, past_key_values=self.cache, use_cache=True)
        final: torch.Tensor = output.last_hidden_state
        return final

    @property
    def position(self) -> int:
        """Number of tokens computed so far, the same for all sequences. Set it to a smaller value to roll back."""
        return self.cache.length

    @position.setter
    def position(self, position: int) -> None:
        self.cache.set_length(position)

    @property
    def route(self) -> Route | None:
        """The servers in use; None before the first step."""
        return self._chain.route if self._chain is not None and self._chain.is_open else None

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """The times of the last step: in the client's own blocks, if it has any, then at each server."""
        local = (self._local.timing,) if self._local is not None and self._local.timing is not None else ()
        return local + (self._chain.timings if self._chain is not None else ())

    def compute(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        tokens: torch.Tensor | None,
        rope_lengths: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Run the hidden states of new slots through all blocks.

        Args:
            hidden: `[sequences, new, hidden_size]`.
            mask: attention mask `[sequences, position + new]`, or None if no slot is padding.
            positions: position ids `[sequences or 1, new]` that the model's layers get, or None.
            tokens: token ids `[sequences, new]`, if known.
            rope_lengths: of the forward that these slots are a part of; None if they are all of it.

        Returns:
            the outputs of the last block, same shape; zero where padded.

        Raises:
            UsageError: the position ids of a sequence do not count on from one to the next.
        """
        sequences, new, _ = hidden.shape
        layout, real = self._next_layout(sequences, new, mask, positions)
        rope_lengths = rope_lengths or self._rope_lengths(layout, new)
        layout = replace(layout, rope_lengths=rope_lengths)
        max_slots = max(1, MAX_REQUEST_TOKENS // sequences)
        if layout.tokens:
            chain = self._open_chain()
            # A step that copies sequences or rolls them back must finish at all servers before another one follows.
            first_alone = not chain.appends(layout)
            servers = [hop.server for hop in chain.route.hops]
            chunk = chunk_slots(new, sequences, servers, first_alone)
            if chunk < new and first_alone:
                max_slots = chunk
        if new > max_slots:
            return self._compute_in_two_steps(hidden, mask, positions, tokens, max_slots, rope_lengths)
        result = hidden
        if layout.tokens:
            result = self._compute_chunks(hidden, layout, real, chunk)
        self.cache.commit(sequences, new, real, tokens)
        return result

    def _rope_lengths(self, layout: StepLayout, new: int) -> tuple[int, ...] | None:
        """See `StepLayout`; None where they make no difference."""
        if self.rope_limit is None or new == 1:
            return None
        ends = tuple(max(end, self.text_length) for end in layout.ends)
        return ends if max(ends) > self.rope_limit else None

    def _next_layout(
        self, sequences: int, new: int, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> tuple[StepLayout, torch.Tensor | None]:
        """The layout of a step of `new` slots, and which of them hold tokens; see `PlaceholderCache.layout`."""
        if self._closed:
            raise SessionClosed("this inference session is closed; open another one")
        layout, real = self.cache.layout(sequences, new, mask)
        longest = max(start + count for start, count in zip(layout.starts, layout.counts, strict=True))
        if longest > self.max_length:
            if not self.grows:
                raise TooLong(
                    f"the session would be {longest} tokens long; it was opened with max_length={self.max_length}"
                )
            self._grow(longest + self.max_length)
        return replace(layout, offsets=position_offsets(positions, real, layout)), real

    def begin(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        tokens: torch.Tensor | None,
        exits: ExitTerms | None = None,
        exit_block: int | None = None,
    ) -> StepUnderWay:
        """Send the hidden states of new slots off, without waiting for what becomes of them.

        Takes the same as `compute`, and raises the same. Steps that were begun are settled in order, or given up.

        Args:
            exits: when tokens may leave inside a server's span, after `prepare_for`; then there is one new slot.
            exit_block: the first in front of which the caller may let them leave; 0 for guesses. Servers that begin
                there or behind let steps go first for which others wait.
        """
        sequences, new, _ = hidden.shape
        layout, real = self._next_layout(sequences, new, mask, positions)
        layout = replace(layout, rope_lengths=self._rope_lengths(layout, new))
        chain = self._open_chain()
        inputs = hidden if self._local is None else self._local.compute(hidden, real, layout)
        packed = pack_hidden(inputs, real, self._connection.config.wire)
        number = self._connection.run(chain.begin(packed, layout, exits, exit_block))
        before = self.cache.length
        self.cache.commit(sequences, new, real, tokens, is_exact=exits is None)
        return StepUnderWay(number, before, hidden, real)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Blocks in front of which a step under way can be looked at, ascending: where a server begins."""
        return self._open_chain().route.boundaries

    def wait(self, ready: Callable[[], bool]) -> None:
        """Keep the steps under way going until `ready`, which is asked in the network thread too, or until all servers
        have answered all of them. Raises as `compute` does; then those that are not settled have to be given up."""
        if not ready():
            self._connection.run(self._open_chain().wait(ready))

    def has_outputs(self, step: StepUnderWay, block: int) -> bool:
        """Whether it is known what a step under way is in front of `block`, or behind the last one."""
        return self._chain is not None and self._chain.outputs(step.number, block) is not None

    def outputs(self, step: StepUnderWay, block: int) -> torch.Tensor:
        """What a step under way is in front of `block`, or behind the last one, like the hidden states that went in."""
        packed = self._open_chain().outputs(step.number, block)
        if packed is None:
            raise ValueError(f"what step {step.number} is in front of block {block} is not known")
        return unpack_hidden(packed, step.hidden, step.real)

    def left(self, step: StepUnderWay, block: int) -> tuple[int, ...]:
        """For each sequence, the block in front of which its token left a span before `block`; 0 if it did not."""
        packed = self._open_chain().outputs(step.number, block)
        return packed.left if packed is not None and packed.left is not None else (0,) * len(step.hidden)

    def report(self, event: SessionEvent) -> None:
        """Tell the listeners of the session, which are called in this thread."""
        self._open_chain().report(event)

    def warn_once(self, message: str) -> None:
        """A line in the log, if no session of the model has written it lately."""
        self._connection.warn_once(message)

    def settle(self, step: StepUnderWay) -> None:
        """The oldest step under way has come to its end, and stands."""
        self._open_chain().settle(step.number)

    def give_up(self, first: StepUnderWay) -> None:
        """Give up a step under way and all that were begun after it."""
        if self._chain is not None and self._chain.is_open:
            self._connection.run(self._chain.give_up_under_way(first.number - 1))
        self.cache.set_length(min(first.before, self.cache.length))

    def begin_with(self, prefix: Prefix) -> int:
        """Open the session such that it begins with what an earlier one has computed; with how many tokens it does.

        Servers that have lost their part get it from this client. If all have, or the model's adapter has changed, or
        this session computes otherwise, it begins with none.

        Raises as `open`, and `UsageError` if the session is open.
        """
        if self._chain is not None and self._chain.is_open:
            raise UsageError("the session is open; begin another one with the prefix")
        source = prefix.source
        if source.connection is self._connection and type(self.cache) is PlaceholderCache and not self._early_exits:
            self._open_chain(prefix.first(self.max_length))
            if self.begun:
                self.cache.begin_with(prefix.tokens[: self.begun])
                if source.local is not None:
                    self._local = source.local.copy(self.begun, self.max_length)
                self._began_with = source
        return self.begun

    def park(self) -> Prefix | None:
        """Close the session. Its servers may keep what it has computed until other sessions need the room.

        Returns what another session can `begin_with`; None if that is not possible: with several sequences, padding,
        virtual tokens, approximate caches, texts whose rotary frequencies depend on their length, or lost servers.
        """
        prefix = self.share()
        self._closed = True
        self._close_chain(keep=len(prefix) if prefix is not None else 0)
        self._local = None
        if prefix is not None and self._began_with is not None:
            self._began_with.move_to(prefix.source, self.begun)
        return prefix

    def share(self, length: int | None = None) -> Prefix | None:
        """What this session has computed, for others that begin with a copy of it while it is open; None as in `park`.

        Args:
            length: tokens of it; None for all. What is behind them may be under way.
        """
        tokens = self.cache.only_tokens if type(self.cache) is PlaceholderCache else None
        if tokens is None or not len(tokens) or self._early_exits or not self._connection.is_usable:
            return None
        if self._chain is None or not self._chain.is_open:
            return None
        tokens, state = tokens[:length].clone(), self._connection.run(self._chain.state())
        if state is None:
            return None
        source = prefix_source(state, len(tokens), self._digests, self._local, self._connection)
        return Prefix(tokens, source) if source is not None else None

    def open(self) -> Route:
        """Find a route and reserve cache space on its servers now, instead of at the first step."""
        return self._open_chain().route

    def receipts(self) -> tuple[Receipt, ...]:
        """What the servers have computed for this session, signed by them: evidence for others.

        Each is compared with what this client knows. With `keep_receipts`, those of servers that were left in order
        come first, and after `close` there are those of all servers. `swarm.trust.receipts.write_receipts` writes them
        to a file, which `swarm receipt verify` reads.

        Raises:
            ProtocolViolation: a server has signed something else than it has answered; the session goes on without it.
            RemoteError: a server gave no receipt.
        """
        kept = tuple((self._kept_receipts or {}).values())
        if self._chain is None or not self._chain.is_open:
            return kept
        return (*kept, *self._connection.run(self._chain.receipts()))

    def resume(self) -> Route:
        """Replace lost servers now, instead of at the next step.

        After `MissingBlocks` the session still knows everything up to the last step that succeeded.
        """
        chain = self._open_chain()
        self._connection.run(chain.resume())
        return chain.route

    def _compute_in_two_steps(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        tokens: torch.Tensor | None,
        size: int,
        rope_lengths: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """`compute` for the first `size` slots, and then for the rest."""
        past = self.position
        outputs = []
        for slots in (slice(0, size), slice(size, hidden.shape[1])):
            outputs.append(
                self.compute(
                    hidden[:, slots],
                    mask[:, : past + slots.stop] if mask is not None else None,
                    positions[:, slots] if positions is not None else None,
                    tokens[:, slots] if tokens is not None else None,
                    rope_lengths,
                )
            )
        return torch.cat(outputs, dim=1)

    def _compute_chunks(
        self,
        hidden: torch.Tensor,
        layout: StepLayout,
        real: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        """The blocks' outputs; chunks of `size` slots follow each other through the chain."""
        chunks = list(split_step(layout, real, hidden.shape[1], size))
        steps = []
        for slots, chunk_layout, chunk_real in chunks:
            inputs = hidden[:, slots]
            if self._local is not None:
                inputs = self._local.compute(inputs, chunk_real, chunk_layout)
            steps.append((pack_hidden(inputs, chunk_real, self._connection.config.wire), chunk_layout))
        outputs = self._connection.run(self._open_chain().steps(steps))
        if self._local is not None:
            self._local.confirm()
        return unpack_chunks(outputs, chunks, hidden)

    def _grow(self, max_length: int) -> None:
        """Go on with a chain for longer sequences, which computes again what was computed. No step is under way."""
        before, shorter = self._chain, self.max_length
        self.max_length = max_length
        if before is None or not before.is_open:
            return
        self._chain = self._new_chain()
        try:
            self._connection.run(self._chain.open())
            self._connection.run(self._chain.steps(before.inputs()))
        except BaseException:
            self._close_chain()
            self._chain, self.max_length = before, shorter
            raise
        self._connection.run(before.close())

    def _new_chain(self) -> Chain:
        return self._connection.new_chain(
            self.max_length, self._adapter, self._listener, self._early_exits, self._kept_receipts
        )

    def _open_chain(self, prefix: Prefix | None = None) -> Chain:
        """The open chain; it is opened if it is not yet, with `prefix` if servers still have that (see `begun`)."""
        if self._closed:
            raise SessionClosed("this inference session is closed; open another one")
        if self._chain is None or not self._chain.is_open:
            self._close_chain()
            parts = adapter_parts(self._model.remote_blocks.adapter, Span(0, self._connection.blocks))
            remote_parts = {block: part for block, part in parts.items() if block in self._connection.span}
            if self._connection.local is not None:
                self._local = self._connection.local.session(detach_parts(parts))
            self._adapter = pack_adapter(remote_parts)
            own = pack_adapter({block: part for block, part in parts.items() if block not in remote_parts})
            whole = Span(0, self._connection.blocks)
            self._digests = self._adapter.digests(whole), own.digests(whole)
            if prefix is not None and prefix.source.adapter != self._digests:
                prefix = None
            # Assigned before it is open: if Ctrl-C interrupts the opening, the chain still has to be closed.
            self._chain = self._new_chain()
            self.begun = self._connection.run(self._chain.open(prefix, self.room_timeout))
        return self._chain

    def close(self) -> None:
        """Free the session on all servers. A closed session cannot be used again."""
        self._closed = True
        self._close_chain()
        self._local = None

    def _close_chain(self, keep: int = 0) -> None:
        if self._chain is not None:
            chain, self._chain = self._chain, None
            if self._connection.is_usable:
                self._connection.run(chain.close(keep))

    def __del__(self) -> None:
        if self._chain is not None:  # it was dropped without being closed
            self._connection.release(self._chain)

    def __enter__(self) -> InferenceSession:
        self._model.enter_session(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._model.leave_session(self)
        self.close()
