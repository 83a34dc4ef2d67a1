"""What a request takes of a server's memory, from its header's arrival until it is answered.

A frame's header says what the whole request will take: its payload, its inputs and outputs, its reply, keys and values
of sequences that no session reserved, graphs for gradients. All of that is charged to the peer that sends it before the
payload is read. Until there is room the frame waits; after a while it is refused. So an admitted request never waits
for memory that another one holds.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.common.units import format_bytes
from swarm.errors import MemoryFull, TooLong
from swarm.metrics.server import ServerObserver
from swarm.models.execution.gradients import MAX_GRAPH_BYTES, graph_bytes
from swarm.models.execution.session_cache import forward_slots
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import count_values
from swarm.server.limits import REQUEST_PEER_SHARE, step_token_bytes
from swarm.server.memory import REQUEST_BYTES, MemoryPool
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.request_validation import RequestLimits

ROOM_TIMEOUT_S = 60.0
"""How long a frame waits, unread, for memory. After a restart all clients replay their texts at once, and a slow server
takes many seconds for each piece. A client that is refused leaves the server with all its sessions."""

TRAINING_ROOM_TIMEOUT_S = 300.0
"""The same for forwards and backwards. Clients send several at once, and a slow server may take half a minute for each;
the clients' own deadlines allow for that."""

STREAM_BYTES = 1 << 17
"""What a stream takes before a frame is admitted: what was received of it, and its header."""

PRESSED_S = 30.0
"""While others wait for memory, a body that has not come by then loses its place to a peer that holds less."""

LARGE_BYTES = 1 << 16
"""A payload beyond this exists twice for a moment, in the reader's buffer and as itself."""

GRADIENT_BYTES = 4
"""Bytes of a value of an adapter's gradient."""


class RequestAccount:
    """The memory for requests of one server.

    Args:
        model: the span that it holds.
    """

    def __init__(
        self, model: SpanModel, limits: RequestLimits, adapters: AdapterStore, observer: ServerObserver
    ) -> None:
        self._model = model
        self._limits = limits
        self._adapters = adapters
        self._observer = observer
        self.pool = MemoryPool(limits.memory, REQUEST_PEER_SHARE, REQUEST_BYTES)
        self.arriving: set[Admission] = set()
        self.report()

    def open_stream(
        self, stream: object, peer: str, interrupt: Callable[[MemoryFull], None] = lambda error: None
    ) -> Admission:
        """Charge a stream, and admit its frames. Raises `MemoryFull`.

        Args:
            interrupt: ends the receipt of a frame that was admitted.
        """
        try:
            self.pool.charge(stream, peer, STREAM_BYTES)
        except MemoryFull:
            self.note_refused()
            raise
        return Admission(self, peer, interrupt)

    def close_stream(self, stream: object) -> None:
        """The stream has ended."""
        self.pool.release(stream)

    def report(self) -> None:
        """Tell the observer what is charged."""
        self._observer.memory_totals(self.pool.capacity - self.pool.free, self.pool.capacity)

    def needs(self, peer: str, message: messages.ClientMessage, payload_length: int) -> int:
        """Bytes that a peer's request takes with a payload of this length; little more if it will be refused."""
        received = payload_length if payload_length <= LARGE_BYTES else 2 * payload_length
        match message:
            case messages.StepRequest():
                return received + self._step_bytes(message, received)
            case messages.PushRequest():
                return received + self._step_bytes(message.step, received)
            case messages.ReplayRequest():
                return received + self._tokens_bytes(sum(message.counts), self._limits.step_tokens)
            case messages.ForwardRequest():
                return received + self._forward_bytes(message)
            case messages.BackwardRequest():
                return received + self._backward_bytes(peer, message)
            case messages.PutAdapters():
                return received + self._adapter_values_bytes(message)
            case messages.ProbeRequest():
                return received + message.reply_bytes
        return received

    def end_slow_arrivals(self, peer: str) -> None:
        """Make room for a peer: end the bodies that have come slowly, of peers that hold more than it."""
        late, held = asyncio.get_running_loop().time() - PRESSED_S, self.pool.held_by_peer(peer)
        for one in [one for one in self.arriving if one.since < late and self.pool.held_by_peer(one.peer) > held]:
            self.arriving.discard(one)
            self.note_refused()
            one.interrupt(
                MemoryFull(
                    "others need this server's memory, and the request came too slowly for what this peer holds of "
                    "it; send less at once, or ask another server"
                )
            )

    def note_refused(self) -> None:
        """A stream or a frame found no room."""
        self._observer.memory_refused()

    def _step_bytes(self, step: messages.StepRequest, received: int) -> int:
        """What a step takes besides its session's cache. Sequences that are copied exist twice until it is computed.

        Their session has reserved as much, so the copy is never too large. At most half of what a peer may have is
        charged, because the peer's other streams need memory too.
        """
        computing = self._tokens_bytes(sum(step.counts), self._limits.step_tokens)
        copied = 0
        if step.sources is not None and self._model.strategy.paging is None:
            slots = len(step.sources) * (max(step.starts, default=0) + max(step.counts))
            room = self.pool.quota // 2 - received - computing
            states = len(step.sources) * self._limits.sequence_bytes
            copied = max(0, min(slots * self._limits.slot_bytes * self._model.span.length + states, room))
        return computing + copied

    def _tokens_bytes(self, tokens: int, limit: int) -> int:
        """See `step_token_bytes`; nothing for what will be refused."""
        return tokens * step_token_bytes(self._model.hidden_size, self._model.dtype.itemsize) if tokens <= limit else 0

    def _forward_bytes(self, message: messages.ForwardRequest) -> int:
        tokens, blocks = sum(message.counts), min(self._model.span.length, max(0, message.end - message.start))
        if tokens > self._limits.step_tokens:
            return 0
        slots = forward_slots(self._model.strategy, message.counts) * self._limits.slot_bytes * blocks
        states = len(message.counts) * self._limits.sequence_bytes
        return self._tokens_bytes(tokens, self._limits.step_tokens) + slots + states

    def _backward_bytes(self, peer: str, message: messages.BackwardRequest) -> int:
        tokens, limit = sum(message.counts), self._limits.backward_tokens
        if not 0 < tokens <= limit:
            return 0
        # The server sets `MAX_GRAPH_BYTES` aside for the one graph that it computes.
        graph = max(0, graph_bytes(self._model, message.counts) - MAX_GRAPH_BYTES)
        # Those of one group of sequences, of all, and in the reply.
        gradients = 3 * GRADIENT_BYTES * self._adapters.value_count(peer, message.start, message.adapters)
        return 2 * self._tokens_bytes(tokens, limit) + gradients + graph

    def _adapter_values_bytes(self, message: messages.PutAdapters) -> int:
        """What the adapter takes when it is unpacked. Its limits are those of `AdapterStore`."""
        width = HIDDEN_DTYPES[message.dtype].itemsize if message.dtype in HIDDEN_DTYPES else 1
        values = sum(count_values(block, self._model.hidden_size) for block in message.blocks if block is not None)
        return min(values * width, self._adapters.limits.peer_memory)


class Admission:
    """Admits the frames of one stream, one after the other.

    Attributes:
        message: that of the frame which was read last.
        since: when that frame was admitted, by the loop's clock.
        interrupt: ends the receipt of its payload.
    """

    message: messages.ClientMessage
    since: float

    def __init__(self, account: RequestAccount, peer: str, interrupt: Callable[[MemoryFull], None]) -> None:
        self._account = account
        self.peer = peer
        self.interrupt = interrupt

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
        account, pool = self._account, self._account.pool
        needed = account.needs(self.peer, self.message, payload_length)
        training = isinstance(self.message, messages.WholeSequencesRequest)
        try:
            if needed + STREAM_BYTES > pool.quota:
                raise (MemoryFull if training else TooLong)(
                    f"the request takes {format_bytes(needed)} of this server's memory, and one peer gets "
                    f"{format_bytes(pool.quota)} for its requests; send fewer tokens at once, or ask another server"
                )
            timeout_s = TRAINING_ROOM_TIMEOUT_S if training else ROOM_TIMEOUT_S
            make_room = functools.partial(account.end_slow_arrivals, self.peer)
            await pool.charge_or_wait(self, self.peer, needed, timeout_s, make_room)
        except (MemoryFull, TooLong):
            account.note_refused()
            raise
        self.since = asyncio.get_running_loop().time()
        account.arriving.add(self)

    def has_arrived(self) -> None:
        """The payload was read."""
        self._account.arriving.discard(self)

    def release(self) -> None:
        """The frame is answered, or lost."""
        self._account.arriving.discard(self)
        self._account.pool.release(self)
