"""What a request takes of a server's memory, from its header's arrival until it is answered.

A frame's header says what the whole request will take: its payload, its inputs and outputs, its reply, keys and values
of sequences that no session reserved, graphs for gradients. All of that is charged to the peer that sends it before the
payload is read. Until there is room the frame waits; after a while it is refused. So an admitted request never waits
for memory that another one holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.common.units import format_bytes
from swarm.errors import MemoryFull, TooLong
from swarm.metrics.server import MEMORY_KINDS, ServerObserver
from swarm.models.execution.gradients import MAX_GRAPH_BYTES, graph_bytes
from swarm.models.execution.session_cache import forward_slots
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import count_values
from swarm.server.limits import REQUEST_PEER_SHARE, step_token_bytes
from swarm.server.memory.peer_standing import PeerStanding
from swarm.server.memory.pool import REQUEST_BYTES, MemoryPool
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.request_validation import RequestLimits

NEW_PEERS_SHARE = 0.75
"""Share that peers of less than full standing may have together."""

ROOM_TIMEOUT_S = 60.0
"""How long a frame waits, unread, for memory. After a restart all clients replay their texts at once, and a slow server
takes many seconds for each piece. A client that is refused leaves the server with all its sessions."""

TRAINING_ROOM_TIMEOUT_S = 300.0
"""The same for forwards and backwards. Clients send several at once, and a slow server may take half a minute for each;
the clients' own deadlines allow for that."""

STREAM_BYTES = 1 << 17
"""What a stream takes before a frame is admitted: what was received of it, and its header."""

PRESSED_GRACE_S = 10.0
PRESSED_BYTES_PER_S = 1 << 16
PRESSED_S = 30.0
"""While others wait for memory, a body of a new peer loses its place unless it comes within `PRESSED_GRACE_S` and its
length divided by `PRESSED_BYTES_PER_S`; or, if the peer holds more than comes in `PRESSED_S` at this rate, by what it
holds divided by `PRESSED_S`. So a peer that holds much has to send it quickly, and holds it for at most 40 s. An uplink
of 0.5 Mbit/s brings this rate."""

CHECK_PERIOD_S = 1.0
"""How often the server looks for such bodies."""

LARGE_BYTES = 1 << 16
"""A payload beyond this exists twice for a moment, in the reader's buffer and as itself."""

GRADIENT_BYTES = 4
"""Bytes of a value of an adapter's gradient."""


@dataclass(frozen=True)
class RequestNeeds:
    """Bytes that a request takes.

    Attributes:
        received: its payload.
        computing: inputs, outputs, reply, and what is cached for it alone.
        training: what a graph takes beyond `MAX_GRAPH_BYTES`, which a server keeps for the one that it computes.
    """

    received: int = 0
    computing: int = 0
    training: int = 0

    @property
    def total(self) -> int:
        return self.received + self.computing + self.training


class RequestMemory:
    """The memory for requests of one server.

    Args:
        model: the span that it holds.
        standing: of peers; None if all are alike.
    """

    def __init__(
        self,
        model: SpanModel,
        limits: RequestLimits,
        adapters: AdapterStore,
        standing: PeerStanding | None,
        observer: ServerObserver,
    ) -> None:
        self._model = model
        self._limits = limits
        self._adapters = adapters
        self._observer = observer
        self._kinds: Counter[str] = Counter()
        self._standing = standing
        self._arriving: dict[Admission, _Arrival] = {}
        self._check: asyncio.TimerHandle | None = None
        if standing is None:
            self.pool = MemoryPool(limits.memory, REQUEST_PEER_SHARE, REQUEST_BYTES)
        else:
            self.pool = MemoryPool(limits.memory, REQUEST_PEER_SHARE, REQUEST_BYTES, standing, NEW_PEERS_SHARE)
        self.report()

    def open_stream(
        self, stream: object, peer: str, interrupt: Callable[[MemoryFull], None] = lambda error: None
    ) -> Admission:
        """Charge a stream, and admit its frames. Raises `MemoryFull`.

        Args:
            interrupt: ends the receipt of a frame that was admitted.
        """
        try:
            self.pool.allocate(stream, peer, STREAM_BYTES, may_overtake=True)
        except MemoryFull:
            self.note_refused()
            raise
        self._kinds["streams"] += STREAM_BYTES
        return Admission(self, peer, interrupt)

    def close_stream(self, stream: object) -> None:
        """The stream has ended."""
        self._kinds["streams"] -= self.pool.held_by(stream)
        self.pool.release(stream)

    def report(self) -> None:
        """Tell the observer what is charged."""
        self._observer.memory_totals({kind: self._kinds[kind] for kind in MEMORY_KINDS}, self.pool.capacity)

    def needs(self, peer: str, message: messages.ClientMessage, payload_length: int) -> RequestNeeds:
        """What a peer's request takes with a payload of this length; little more if it will be refused."""
        received = payload_length if payload_length <= LARGE_BYTES else 2 * payload_length
        match message:
            case messages.StepRequest():
                return self._step_needs(message, received)
            case messages.PushRequest():
                return self._step_needs(message.step, received)
            case messages.ReplayRequest():
                return RequestNeeds(received, self._tokens_bytes(sum(message.counts), self._limits.step_tokens))
            case messages.ForwardRequest():
                return RequestNeeds(received, self._forward_bytes(message))
            case messages.BackwardRequest():
                return self._backward_needs(peer, message, received)
            case messages.PutAdapters():
                return RequestNeeds(received, self._adapter_values_bytes(message))
            case messages.ProbeRequest():
                return RequestNeeds(received, message.reply_bytes)
        return RequestNeeds(received)

    def charge(self, needs: RequestNeeds, sign: int) -> None:
        """Count what is charged, by kind."""
        kinds = self._kinds
        kinds["received"] += sign * needs.received
        kinds["computing"] += sign * needs.computing
        kinds["training"] += sign * needs.training

    def begin_arrival(self, admission: Admission, arrival: _Arrival) -> None:
        """A frame was admitted, and its payload is read from now on."""
        self._arriving[admission] = arrival

    def end_arrival(self, admission: Admission) -> None:
        """The frame is complete, or lost."""
        self._arriving.pop(admission, None)

    def press(self) -> None:
        """A frame has to wait: while any does, bodies of new peers that come slowly lose their places."""
        if self._check is None and self._standing is not None:
            self._check = asyncio.get_running_loop().call_later(CHECK_PERIOD_S, self._end_slow_arrivals)

    def _end_slow_arrivals(self) -> None:
        """End those of peers that hold more for their standing than a peer that waits."""
        self._check = None
        waiting = self.pool.least_waiting_rank
        if waiting is None or self._standing is None:
            return
        now = asyncio.get_running_loop().time()
        for admission, arrival in list(self._arriving.items()):
            peer = arrival.peer
            is_late = now > arrival.since + arrival.seconds_if_pressed(self.pool.held_by_peer(peer))
            if is_late and self._standing(peer) < 1 and self.pool.rank(peer) > waiting:
                self.end_arrival(admission)
                self.note_refused()
                arrival.interrupt(
                    MemoryFull(
                        "others need this server's memory, and the request came too slowly for what this peer holds of "
                        "it; send less at once, or ask another server"
                    )
                )
        self.press()

    def note_refused(self) -> None:
        """A stream or a frame found no room."""
        self._observer.memory_refused()

    def _step_needs(self, step: messages.StepRequest, received: int) -> RequestNeeds:
        """What a step takes besides its session's cache. Sequences that are copied exist twice until it is computed.

        Their session has reserved as much, so the copy is never too large. At most half of what a peer may have is
        charged, because the peer's other streams need memory too.
        """
        computing = self._tokens_bytes(sum(step.counts), self._limits.step_tokens)
        copied = 0
        if step.sources is not None and self._model.strategy.paging is None:
            slots = len(step.sources) * (max(step.starts, default=0) + max(step.counts))
            room = self.pool.quota // 2 - received - computing
            copied = max(0, min(slots * self._limits.slot_bytes * self._model.span.length, room))
        return RequestNeeds(received, computing + copied)

    def _tokens_bytes(self, tokens: int, limit: int) -> int:
        """See `step_token_bytes`; nothing for what will be refused."""
        return tokens * step_token_bytes(self._model.hidden_size, self._model.dtype.itemsize) if tokens <= limit else 0

    def _forward_bytes(self, message: messages.ForwardRequest) -> int:
        tokens, blocks = sum(message.counts), min(self._model.span.length, max(0, message.end - message.start))
        if tokens > self._limits.step_tokens:
            return 0
        slots = forward_slots(self._model.strategy, message.counts) * self._limits.slot_bytes * blocks
        return self._tokens_bytes(tokens, self._limits.step_tokens) + slots

    def _backward_needs(self, peer: str, message: messages.BackwardRequest, received: int) -> RequestNeeds:
        tokens, limit = sum(message.counts), self._limits.backward_tokens
        if not 0 < tokens <= limit:
            return RequestNeeds(received)
        graph = max(0, graph_bytes(self._model, message.counts) - MAX_GRAPH_BYTES)
        # Those of one group of sequences, of all, and in the reply.
        gradients = 3 * GRADIENT_BYTES * self._adapters.value_count(peer, message.start, message.adapters)
        return RequestNeeds(received, 2 * self._tokens_bytes(tokens, limit) + gradients, graph)

    def _adapter_values_bytes(self, message: messages.PutAdapters) -> int:
        """What the adapter takes when it is unpacked. Its limits are those of `AdapterStore`."""
        width = HIDDEN_DTYPES[message.dtype].itemsize if message.dtype in HIDDEN_DTYPES else 1
        values = sum(count_values(block, self._model.hidden_size) for block in message.blocks if block is not None)
        return min(values * width, self._adapters.limits.peer_memory)


@dataclass(frozen=True)
class _Arrival:
    """A payload that is being read.

    Attributes:
        since: when it was admitted, by the loop's clock.
        interrupt: ends its receipt.
    """

    peer: str
    length: int
    since: float
    interrupt: Callable[[MemoryFull], None]

    def seconds_if_pressed(self, held: int) -> float:
        """How long it may take while others wait, if its peer holds so many bytes."""
        return PRESSED_GRACE_S + self.length / max(PRESSED_BYTES_PER_S, held / PRESSED_S)


class Admission:
    """Admits the frames of one stream, one after the other.

    Attributes:
        message: that of the frame which was read last.
    """

    message: messages.ClientMessage

    def __init__(self, memory: RequestMemory, peer: str, interrupt: Callable[[MemoryFull], None]) -> None:
        self._memory = memory
        self._peer = peer
        self._interrupt = interrupt
        self._charged: RequestNeeds | None = None

    @property
    def step(self) -> int | None:
        """Number of the step that the message asks for, if it does."""
        return self.message.step if isinstance(self.message, messages.StepRequest) else None

    async def admit(self, header: bytes, payload_length: int) -> None:
        """Charge a frame, before its payload is read.

        Raises:
            ProtocolViolation: the header is no message of a client.
            TooLong: the step takes more memory than a peer may have here.
            MemoryFull: a forward or backward does, which cannot be cut, so another server has to be asked; or there was
                no room for `ROOM_TIMEOUT_S` or `TRAINING_ROOM_TIMEOUT_S` seconds. The stream is interrupted with it if
                the payload then arrives too slowly while others wait.
        """
        self.message = messages.decode_client(header)
        needs, pool = self._memory.needs(self._peer, self.message, payload_length), self._memory.pool
        training = isinstance(self.message, messages.ForwardRequest | messages.BackwardRequest)
        if needs.total + STREAM_BYTES > pool.quota:
            self._memory.note_refused()
            raise (MemoryFull if training else TooLong)(
                f"the request takes {format_bytes(needs.total)} of this server's memory, and one peer gets "
                f"{format_bytes(pool.quota)} for its requests; send fewer tokens at once, or ask another server"
            )
        if not pool.allocate_at_once(self, self._peer, needs.total):
            self._memory.press()
            try:
                timeout_s = TRAINING_ROOM_TIMEOUT_S if training else ROOM_TIMEOUT_S
                await pool.allocate_or_wait(self, self._peer, needs.total, timeout_s)
            except MemoryFull:
                self._memory.note_refused()
                raise
        self._charged = needs
        self._memory.charge(needs, 1)
        since = asyncio.get_running_loop().time()
        self._memory.begin_arrival(self, _Arrival(self._peer, payload_length, since, self._interrupt))

    def has_arrived(self) -> None:
        """The payload was read."""
        self._memory.end_arrival(self)

    def release(self) -> None:
        """The frame is answered, or lost."""
        self._memory.end_arrival(self)
        if self._charged is not None:
            self._memory.charge(self._charged, -1)
            self._charged = None
        self._memory.pool.release(self)
