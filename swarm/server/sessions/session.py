"""One client's open generation at this server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from swarm.data_structures import Span, WireFormat
from swarm.errors import WrongPosition
from swarm.models.execution.session_cache import SessionCache
from swarm.protocol.messages import Receipt, StepReply, StepRequest
from swarm.server.compute.compute_request import ComputeResult
from swarm.server.sessions.push_link import PushLink
from swarm.server.sessions.reply_stream import ReplyStream
from swarm.trust.points import Spender
from swarm.trust.session_record import SessionRecord, Totals

LINK_TIMEOUT_S = 2.0
"""How long a push may be ahead of the client's message that allows it."""

MAX_STEPS_AHEAD = 256
"""How far the number of a pushed step may be ahead of what the session expects. Numbers are left out where a client
gives steps up, at most the chunks of a prompt at once."""


class StepGivenUp(Exception):
    """The client no longer wants the step."""


class KeptReply(NamedTuple):
    """A reply that is kept so that it can be sent again. A request is the same if its checksum is."""

    reply: StepReply
    payload: bytes | memoryview


@dataclass(frozen=True)
class SessionTerms:
    """What a client opened its session for.

    Attributes:
        session_id: chosen by the client.
        peer_id: the client.
        span: the blocks that the session uses.
        max_length: tokens that each of its sequences may have.
        reply_format: wire format of the outputs.
        adapters: digests of what the client adds to the blocks; None for nothing.
        wait_timeout_s: how long the client prefers to wait for cache before it is refused.
        early_exits: whether its tokens may leave inside the span, which is approximate.
        spender: whose points it spends; None for nobody's.
        weight: how much more it gets than sessions without points.
    """

    session_id: bytes
    peer_id: str
    span: Span
    max_length: int
    reply_format: WireFormat
    adapters: list[bytes] | None = None
    wait_timeout_s: float = 0.0
    early_exits: bool = False
    spender: Spender | None = None
    weight: float = 1.0

    def continues(self, before: SessionTerms) -> bool:
        """Whether a session may begin with the cache of one of these terms: it would have computed the same."""
        is_exact = not (self.early_exits or before.early_exits)
        return is_exact and (self.peer_id, self.span, self.adapters) == (before.peer_id, before.span, before.adapters)


class Session:
    """The state of one session.

    Attributes:
        terms: what it was opened for.
        cache: keys and values of its tokens, with the adapters that it uses.
        last_seen: when anything last arrived for it.
        next_step: the smallest number that the next step may have. (A step that its client gave up leaves a gap.)
        epoch: the epoch of the step before (see `StepRequest`).
        given_up: numbers of steps that need not be computed.
        last: the reply to the step before; None if there is none.
        record: what was computed.
        receipt: the newest that was signed, and of what.
        charged: token-blocks of it that its owner of points was charged with.
        begun, begun_with: positions that it has from another session of its client, and the id of that.
        sequences: number of sequences for which cache is reserved.
        attached: number of open connections that use the session.
        client: the newest of them, to which replies to pushed steps go.
        previous_peer: the peer that may push steps into the session, besides the client itself.
        push_sequences: number of sequences that its steps may bring, if the session has fewer.
        push_link: the link to the next server.
        lock: held by the step that is being answered. A step that was given up may be computed and cached after it
            has released the lock; the engine starts the next step, which sets the cache back, after that.
        computing: number and result of that step while the engine has it. A replay has no number.
        reserving: held while cache is reserved, so that two connections never reserve the same sequences twice.
    """

    def __init__(self, terms: SessionTerms, cache: SessionCache) -> None:
        self.terms = terms
        self.cache = cache
        self.last_seen = 0.0
        self.next_step = 0
        self.epoch = 0
        self.given_up = range(0)
        self.last: KeptReply | None = None
        self.record = SessionRecord()
        self.receipt: tuple[Totals, Receipt] | None = None
        self.charged = 0
        self.begun = 0
        self.begun_with: bytes | None = None
        self.sequences = 0
        self.attached = 0
        self.client: ReplyStream | None = None
        self.previous_peer: str | None = None
        self.push_sequences = 1
        self.push_link: PushLink | None = None
        self.lock = asyncio.Lock()
        self.computing: tuple[int | None, asyncio.Future[ComputeResult]] | None = None
        self.reserving = asyncio.Lock()
        self._push_allowed = asyncio.Event()

    @property
    def key(self) -> tuple[str, bytes]:
        """What tells it from all other sessions of the server."""
        return self.terms.peer_id, self.terms.session_id

    @property
    def token_blocks(self) -> int:
        """What was computed for it, as its receipt says."""
        return self.record.tokens * self.terms.span.length

    @property
    def is_busy(self) -> bool:
        """Whether a step of it is being answered, or something is on its way to it, which may take long."""
        return self.lock.locked() or (self.client is not None and self.client.is_arriving)

    def give_up(self, first: int, end: int) -> None:
        """Drop the steps from number `first` up to, but without, `end`.

        The iteration that computes one of them is finished, and may cache its tokens, but the step is not answered.
        """
        continues = first <= self.given_up.stop
        self.given_up = range(min(first, self.given_up.start) if continues and self.given_up else first, end)
        if self.computing is not None and self.has_given_up(self.computing[0]):
            self.abandon_step()

    def has_given_up(self, number: int | None) -> bool:
        """Whether a step need not be computed; `number` is None for a replay, which always has to be.

        Python would compare None with every number of the range, of which there may be two billion.
        """
        return number is not None and number in self.given_up

    def abandon_step(self) -> None:
        """Have the engine drop what it computes for this session, after the iteration that runs."""
        if self.computing is not None and not self.computing[1].done():
            self.computing[1].set_exception(StepGivenUp())

    def is_urgent(self, step: StepRequest) -> bool:
        """Whether the client waits for what these blocks make of a step: its token cannot leave before them."""
        return step.exit_block is None or self.terms.span.start < step.exit_block

    def allow_push_from(self, peer_id: str | None, sequences: int = 1) -> None:
        """Accept pushed steps from this peer and from no other, of so many sequences."""
        self.previous_peer, self.push_sequences = peer_id, sequences
        self._push_allowed.set()
        self._push_allowed = asyncio.Event()

    async def may_push(self, peer_id: str, sequences: int = 1) -> bool:
        """Whether the peer is allowed to push a step of so many sequences, now or within `LINK_TIMEOUT_S`."""

        def is_allowed() -> bool:
            return self.previous_peer == peer_id and sequences <= max(self.sequences, self.push_sequences)

        if not is_allowed():
            with suppress(TimeoutError):
                async with asyncio.timeout(LINK_TIMEOUT_S):
                    while not is_allowed():
                        await self._push_allowed.wait()
        return is_allowed()

    def require_near(self, step: int) -> None:
        """Raise `WrongPosition` for a pushed step whose number is beyond all that the client may have under way."""
        expected = max(self.next_step, self.given_up.stop)
        if step > expected + MAX_STEPS_AHEAD:
            raise WrongPosition(
                f"step {step} was pushed where step {expected} was expected; at most {MAX_STEPS_AHEAD} may be left out"
            )

    def close_push_link(self) -> None:
        """Push no more steps to the next server."""
        if self.push_link is not None:
            self.push_link.close()
            self.push_link = None
