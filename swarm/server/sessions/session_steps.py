"""Steps and replays of open sessions: from a decoded message to the reply, and on to the next server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import torch

from swarm.common.dtypes import dtype_name, not_finite_help
from swarm.common.large_payloads import run_large
from swarm.common.outcome import result_or_error
from swarm.data_structures import ExitThresholds, Span, StepLayout, WireFormat
from swarm.errors import CacheFull, ServerClosing, WrongPosition
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.protocol import messages
from swarm.protocol.compression import is_finite
from swarm.protocol.input_checksum import LaterChecksum, input_checksum
from swarm.server.compute import compute_request
from swarm.server.compute.compute_request import Bytes, ComputeResult
from swarm.server.compute.engine import Engine
from swarm.server.sessions.request_validation import RequestValidator
from swarm.server.sessions.session import KeptReply, Session, StepGivenUp
from swarm.server.sessions.session_table import SessionTable

logger = logging.getLogger(__name__)


class SessionSteps:
    """Validates the steps of all sessions and has them computed.

    Attributes:
        closed: no more steps are accepted.
    """

    def __init__(
        self, sessions: SessionTable, engine: Engine, validator: RequestValidator, observer: ServerObserver
    ) -> None:
        self.closed = False
        self._sessions = sessions
        self._engine = engine
        self._validator = validator
        self._observer = observer
        self._warned_of_nan = False

    async def run_step(
        self, session: Session, message: messages.StepRequest, payload: Bytes, *, asked_by_client: bool
    ) -> tuple[messages.StepReply | None, Bytes]:
        """Compute a step, push its outputs to the next server, and return the reply for the client.

        If the client asks again for the last step, it gets the reply that was kept.
        """
        checksum = await _checksum(message, payload)
        async with session.lock:
            kept = session.last
            if kept is not None and (message.step, checksum) == (kept.reply.step, kept.reply.input_checksum):
                # The reply was lost, or both the client and the previous server have delivered the step.
                return (kept.reply, kept.payload) if asked_by_client else (None, b"")
            if message.step < session.next_step and not asked_by_client:
                return None, b""  # a push that the client has overtaken
            if message.step in session.given_up:
                return None, b""
            self._require_not_closed()
            if message.step < session.next_step:
                raise WrongPosition(f"step {message.step} came where step {session.next_step} was expected")
            if message.epoch not in (message.step, session.epoch):
                raise WrongPosition(f"step {message.step} continues step {message.epoch}, which has not come")
            if message.follows is not None and message.follows >= session.next_step:
                raise WrongPosition(f"step {message.step} follows step {message.follows}, which has not come")
            layout = self._validator.validate_layout(message)
            self._validator.validate_exits(message, session.terms.span, session.terms.early_exits)
            reply_format = session.terms.reply_format
            exits = _exits(session, message)
            try:
                result = await self._extend_cache(session, message, layout, payload, reply_format, exits)
            except StepGivenUp:
                return None, b""
            self._observer.tokens_left(block for block in result.left if block > session.terms.span.start)
            reply = _note_computed(session, message, checksum, result, self._engine.sessions)
            outputs = LaterChecksum(_onward(message, reply), result.payload)
            session.record.add_step(checksum, outputs)
        reply = await self._push_outputs(session, outputs.request, reply, result.payload)
        outputs.compute_later()
        return reply, result.payload

    async def run_replay(
        self, session: Session, message: messages.ReplayRequest, payload: Bytes
    ) -> tuple[messages.ReplayReply, Bytes]:
        """Append the history that a client sends to a server which takes over its session."""
        checksum = await _checksum(message, payload)
        async with session.lock:
            self._require_not_closed()
            layout = self._validator.validate_layout(message)
            reply_format = session.terms.reply_format
            try:
                result = await self._extend_cache(
                    session, message, layout, payload, reply_format if message.return_outputs else None
                )
            except StepGivenUp:  # the session was closed meanwhile
                self._sessions.require_open(session)
                raise
            session.last = None
            session.next_step, session.epoch = message.next_step, message.epoch
            session.given_up = range(0)
            session.record.add_replay(message, checksum, result.payload if message.return_outputs else None)
            return messages.ReplayReply(reply_format, _dtype(session), result.milliseconds, checksum), result.payload

    async def _push_outputs(
        self, session: Session, onward: messages.StepRequest, reply: messages.StepReply, output: Bytes
    ) -> messages.StepReply:
        """Push before replying, because the next server waits for the outputs; the client only keeps a copy."""
        link = session.push_link
        if link is None:
            return reply
        pushed = await link.push(onward, output)
        self._observer.output_pushed(len(output), pushed)
        return msgspec.structs.replace(reply, pushed=pushed)

    async def _extend_cache(
        self,
        session: Session,
        message: messages.StepRequest | messages.ReplayRequest,
        layout: StepLayout,
        payload: Bytes,
        reply_format: WireFormat | None,
        exits: StepExits | None = None,
    ) -> ComputeResult:
        """Validate tokens, append them to the session's cache, and encode the outputs unless `reply_format` is None.

        Raises `StepGivenUp` if the client gives up the step meanwhile.
        """
        self._validator.validate_length(layout, session.terms.max_length)
        await self._validator.validate_payload(layout.tokens, message.format, message.dtype, payload)
        self._sessions.require_open(session)  # a closed session has lost its cache, so that any step would seem wrong
        session.cache.validate_layout(layout)
        number = message.step if isinstance(message, messages.StepRequest) else None
        try:
            await self._sessions.reserve_cache(session, layout.sequences)
        except CacheFull:
            if session.has_given_up(number):
                raise StepGivenUp from None
            raise
        if session.has_given_up(number):  # while it waited for cache
            raise StepGivenUp
        work = compute_request.forward_work(
            session.terms.peer_id,
            session.terms.session_id,
            session.cache,
            layout,
            payload,
            message.format,
            message.dtype,
            reply_format,
            exits,
            urgent=not isinstance(message, messages.StepRequest) or session.is_urgent(message),
            weight=session.terms.weight,
        )
        computing = self._engine.submit(work)
        session.computing = number, computing
        try:
            result = await computing
        finally:
            session.computing = None
        if reply_format is not None and not (self._warned_of_nan or any(layout.starts) or session.cache.adapter):
            output, values = result.payload, layout.tokens * session.cache.model.hidden_size
            if not await run_large(len(output), is_finite, output, values, reply_format, _dtype(session)):
                self._warned_of_nan = True
                job = partial(_warn_of_not_finite, session.cache.model, work.decode, layout)
                self._engine.compute_thread.post(job)
        return result

    def _require_not_closed(self) -> None:
        if self.closed:
            raise ServerClosing("this server is leaving; use another one")


async def _checksum(message: messages.StepRequest | messages.ReplayRequest, payload: Bytes) -> bytes:
    return await run_large(len(payload), input_checksum, message, payload)


def _note_computed(
    session: Session, message: messages.StepRequest, checksum: bytes, result: ComputeResult, sessions: int
) -> messages.StepReply:
    """The reply to a step. The session remembers it, and that the step was computed."""
    left = list(result.left) if any(result.left) else None
    reply_format = session.terms.reply_format
    outputs = reply_format, _dtype(session)
    reply = messages.StepReply(
        message.step, *outputs, result.milliseconds, checksum, left=left, sessions=max(1, sessions)
    )
    session.last = KeptReply(reply, result.payload)
    session.next_step, session.epoch = message.step + 1, message.epoch
    return reply


def _onward(message: messages.StepRequest, reply: messages.StepReply) -> messages.StepRequest:
    """The step at the next server of the route."""
    return messages.StepRequest(
        step=message.step,
        starts=message.starts,
        counts=message.counts,
        format=reply.format,
        dtype=reply.dtype,
        sources=message.sources,
        offsets=message.offsets,
        rope_lengths=message.rope_lengths,
        epoch=message.epoch,
        follows=message.follows,
        exits=message.exits,
        left=reply.left,
        exit_block=message.exit_block,
    )


def _exits(session: Session, message: messages.StepRequest) -> StepExits | None:
    """Where the step's tokens may leave, and have left; None if none has, and none can leave here."""
    model, asked = session.cache.model, message.exits
    terms = ExitThresholds(asked.confidence, asked.thresholds, asked.batch) if asked is not None else None
    if terms is not None and not (model.can_fill and model.exits and model.exits.applies(terms, model.span)):
        terms = None
    if terms is None and not any(message.left or ()):
        return None
    return StepExits(terms, tuple(message.left or (0,) * len(message.counts)))


def _dtype(session: Session) -> str:
    return dtype_name(session.cache.model.dtype)


def _warn_of_not_finite(model: SpanModel, inputs: Callable[[], torch.Tensor], layout: StepLayout) -> None:
    """Say which block makes NaN or infinity of the inputs of a session's first step: all are computed once more."""
    found, dtype = result_or_error(_first_block, model, inputs, layout), dtype_name(model.dtype)
    culprit = f"Block {found}" if isinstance(found, int) else f"One of the blocks {model.span}"
    logger.warning("%s computed NaN or infinity in %s from finite inputs; %s", culprit, dtype, not_finite_help(dtype))


def _first_block(model: SpanModel, inputs: Callable[[], torch.Tensor], layout: StepLayout) -> int | None:
    hidden = inputs().to(model.dtype)
    for block in range(model.span.start, model.span.end):
        part = model.narrowed(Span(block, block + 1))
        hidden = forward_without_cache(part, hidden, replace(layout, sources=None))
        if not bool(hidden.isfinite().all()):
            return block
    return None
