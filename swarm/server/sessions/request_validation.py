"""Checks that a request has to pass before anything is computed for it. Every error names a fault of the sender."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from swarm.common.large_payloads import run_large
from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.errors import ExitRefused, NotFinite, TooLong, WrongShape, WrongSpan
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import is_finite, load_quantizer, payload_bytes
from swarm.server.limits import DEFAULT_REQUEST_BYTES

HiddenStatesRequest = messages.StepRequest | messages.ReplayRequest | messages.WholeSequencesRequest
"""Requests that carry hidden states of some sequences."""


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        step_tokens: tokens in one step or forward.
        backward_tokens: tokens in one backward, which needs more memory for each.
        streams: open connections of one peer. Another server needs one for each session that it pushes to.
        memory: bytes that all requests on their way may take, see `request_memory`.
        slot_bytes: bytes of a position's keys and values in one block.
        sequence_bytes: bytes of the states of a sequence in all blocks.
    """

    step_tokens: int = 16384
    backward_tokens: int = 4096
    streams: int = messages.MAX_PEER_SESSIONS
    memory: int = DEFAULT_REQUEST_BYTES
    slot_bytes: int = 0
    sequence_bytes: int = 0


class RequestValidator:
    """Validates requests to one server.

    Args:
        model: the span that the server holds.
        revision: of the model.
        limits: see `RequestLimits`.
    """

    def __init__(self, model: SpanModel, revision: str, limits: RequestLimits) -> None:
        self._model = model
        self._revision = revision
        self._limits = limits
        self._quantizer_loaded = False

    async def load_formats(self, *formats: WireFormat) -> None:
        """Load what these formats need: it takes a second or more, once, in which others' steps go on."""
        if WireFormat.BLOCKWISE8 in formats and not self._quantizer_loaded:
            await asyncio.to_thread(load_quantizer, self._model.device)
            self._quantizer_loaded = True

    @property
    def max_payload(self) -> int:
        """Size in bytes that no valid payload exceeds."""
        tokens = max(self._limits.step_tokens, 2 * self._limits.backward_tokens)
        return max(tokens * self._model.hidden_size * 4, messages.MAX_PROBE_BYTES)

    def validate_span(self, revision: str, start: int, end: int) -> Span:
        """The blocks [start, end), if this server holds them. Raises `WrongSpan`."""
        held = self._model.span
        if not held.start <= start < end <= held.end:
            raise WrongSpan(f"blocks {start}:{end} were asked for, this server holds {held}")
        if revision != self._revision:
            raise WrongSpan(f"revision {revision} was asked for, this server holds revision {self._revision}")
        return Span(start, end)

    def validate_layout(self, message: HiddenStatesRequest) -> StepLayout:
        """The layout of a request. Raises `WrongShape` if its lists differ in length, or `TooLong`."""
        sequences = len(message.counts)
        starts, rope_lengths = [0] * sequences, None
        if isinstance(message, messages.StepRequest | messages.ReplayRequest):
            starts, rope_lengths = message.starts, message.rope_lengths
        sources = message.sources if isinstance(message, messages.StepRequest) else None
        lists = {"starts": starts, "sources": sources, "offsets": message.offsets, "rope_lengths": rope_lengths}
        for name, values in lists.items():
            if values is not None and len(values) != sequences:
                raise WrongShape(f"a request of {sequences} sequences has {len(values)} {name}")
        layout = StepLayout(
            tuple(starts),
            tuple(message.counts),
            tuple(sources) if sources is not None else None,
            tuple(message.offsets) if message.offsets is not None else None,
            tuple(rope_lengths) if rope_lengths is not None else None,
        )
        self._validate_positions(layout)
        is_whole = isinstance(message, messages.WholeSequencesRequest)
        return replace(layout, rope_lengths=layout.ends) if is_whole else layout

    def validate_exits(self, message: messages.StepRequest, span: Span, early_exits: bool) -> None:
        """Check where the tokens of a step may leave, or have left.

        Args:
            span: the session's blocks.
            early_exits: whether the session was opened for that.

        Raises:
            ExitRefused: it was not, or a token cannot have left there, or a sequence brings more than one token.
            WrongShape: there are more or fewer sequences in `left` than in the step.
        """
        if message.exits is None and message.left is None:
            return
        if not early_exits:
            raise ExitRefused("this session was not opened with early_exits, so its tokens pass all blocks")
        if max(message.counts) > 1:
            raise ExitRefused(
                f"a sequence brings {max(message.counts)} tokens; tokens may leave early only in steps that bring at "
                "most one for each sequence"
            )
        left = message.left or ()
        if message.left is not None and len(left) != len(message.counts):
            raise WrongShape(f"a request of {len(message.counts)} sequences has {len(left)} in left")
        for sequence, (block, count) in enumerate(zip(left, message.counts, strict=False)):
            if block > span.start or (block and not count):
                raise ExitRefused(
                    f"sequence {sequence} brings {count} tokens and left in front of block {block}; blocks {span} are "
                    "computed here"
                )

    def validate_length(self, layout: StepLayout, max_length: int) -> None:
        """Raise `TooLong` if a sequence grows beyond the length that the session was opened for."""
        for sequence, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            if start + count > max_length:
                raise TooLong(
                    f"sequence {sequence} would be {start + count} tokens long; the session was opened for {max_length}"
                )

    async def validate_payload(self, tokens: int, wire: WireFormat, dtype: str, payload: bytes | memoryview) -> None:
        """Raise `TooLong`, `WrongDtype`, `WrongShape` or `NotFinite` unless the payload is `[tokens, hidden]` like
        that."""
        self._validate_token_count(tokens, self._limits.step_tokens)
        hidden = self._model.hidden_size
        expected = payload_bytes(tokens * hidden, wire, dtype)
        if len(payload) != expected:
            raise WrongShape(f"{tokens} tokens of {hidden} values take {expected} bytes as {wire}, got {len(payload)}")
        if not await run_large(len(payload), is_finite, payload, tokens * hidden, wire, dtype):
            raise NotFinite("the hidden states hold NaN or infinity, which would spoil the session's cache")
        await self.load_formats(wire)

    async def validate_gradients(
        self, tokens: int, message: messages.BackwardRequest, payload: bytes | memoryview
    ) -> None:
        """Raise `TooLong`, `WrongDtype`, `WrongShape` or `NotFinite` unless the payload is that of a backward.

        It consists of inputs and gradients, each `[tokens, hidden]` in its format.
        """
        self._validate_token_count(tokens, self._limits.backward_tokens)
        values, dtype = tokens * self._model.hidden_size, message.dtype
        inputs = payload_bytes(values, message.format, dtype)
        gradients = payload_bytes(values, message.reply_format, dtype)
        if len(payload) != inputs + gradients:
            raise WrongShape(
                f"inputs and gradients of {tokens} tokens take {inputs} + {gradients} bytes as {message.format} and "
                f"{message.reply_format}, got {len(payload)}"
            )
        whole = memoryview(payload)
        if not await run_large(inputs, is_finite, whole[:inputs], values, message.format, dtype):
            raise NotFinite("the hidden states hold NaN or infinity")
        if not await run_large(gradients, is_finite, whole[inputs:], values, message.reply_format, dtype):
            raise NotFinite("the gradients hold NaN or infinity; check the loss")
        await self.load_formats(message.format, message.reply_format)

    def _validate_token_count(self, tokens: int, limit: int) -> None:
        if not 0 < tokens <= limit:
            raise TooLong(f"{tokens} tokens in one request; this server takes 1 to {limit}")

    def _validate_positions(self, layout: StepLayout) -> None:
        """Raise `TooLong` for a position beyond a table of the model. The computation would fail; on a GPU, for all."""
        limit = self._model.positions
        if limit is None:
            return
        for sequence, end in enumerate(layout.ends):
            if end > limit:
                raise TooLong(f"sequence {sequence} reaches position {end}; this model has {limit} positions")
