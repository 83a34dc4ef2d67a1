"""A model of the protocol: what a server has to make of each message of a session, written down once more, simply.

A token is the bytes of its hidden state. What a server has cached is compared in the end with what it computes from the
same tokens without a session.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swarm.data_structures import WireFormat
from swarm.errors import ProtocolViolation, WrongDtype
from swarm.protocol import messages
from swarm.protocol.compression import is_finite, payload_bytes
from swarm.protocol.input_checksum import input_checksum
from swarm.server.sessions.session import MAX_STEPS_AHEAD
from tests.fuzz.targets import HIDDEN_SIZE, ServerTarget

TOKEN_BYTES = 4 * HIDDEN_SIZE
TOKENS = [row.tobytes() for row in np.random.default_rng(7).standard_normal((97, HIDDEN_SIZE)).astype(np.float32)]
MAX_STEP_TOKENS = 16384
NO_FORMAT = WireFormat.NONE

ANSWERED, SILENT, REFUSED, CLOSED, UNSURE = "answered", "not answered", "refused", "closed", "unsure"
"""What a server has to do with a message. Unsure: both an answer and a refusal are right."""

BUSY = frozenset({"cache_full", "memory_full", "cache_reclaimed", "peer_timeout"})
"""Refusals by which a server says that it has no room, which may meet any message."""


def tokens_of(payload: bytes) -> list[bytes]:
    """The tokens of a payload of float32 numbers."""
    return [payload[at : at + TOKEN_BYTES] for at in range(0, len(payload), TOKEN_BYTES)]


@dataclass
class SessionModel:
    """What a server has to know of a session.

    Attributes:
        rows: the tokens of each sequence.
        kept: checksums of the last step's request, by its number.
        adapters: digests of what is added to each block; None for nothing.
        is_known: whether the server has it for sure.
        is_certain: whether `rows` is all that it can have cached.
    """

    session_id: bytes
    server: ServerTarget
    start: int
    end: int
    max_length: int
    sequences: int = 1
    adapters: list[bytes] | None = None
    rows: list[list[bytes]] = field(default_factory=list)
    next_step: int = 0
    epoch: int = 0
    given_up: range = range(0)
    kept: dict[int, bytes] = field(default_factory=dict)
    is_known: bool = False
    is_certain: bool = True

    def opening(self, revision: str, wait_timeout_s: float = 0.0) -> messages.OpenSession:
        """The message that opens it, or opens it again."""
        return messages.OpenSession(
            self.session_id,
            revision,
            self.start,
            self.end,
            self.max_length,
            NO_FORMAT,
            self.sequences,
            wait_timeout_s,
            self.adapters,
        )

    def right_step(self, random: random.Random) -> tuple[messages.StepRequest, bytes]:
        """A step that the server has to compute, and its payload: more tokens, rollbacks, copies, new sequences."""
        known = len(self.rows)
        copies = known > 0 and random.random() < 0.2
        rows = random.randint(1, self.sequences) if copies or not known or random.random() < 0.15 else known
        sources = [random.randrange(known) for _ in range(rows)] if copies else None
        starts, counts = [], []
        for row in range(rows):
            source = sources[row] if sources is not None else row
            length = len(self.rows[source]) if source < known else 0
            start = length if random.random() < 0.8 else random.randint(0, length)
            room = self.max_length - start
            counts.append(min(room, random.choice((0, 1, 1, 1, 2, 5))))
            starts.append(start)
        if not sum(counts):
            row = min(range(rows), key=lambda one: starts[one])
            starts[row] = min(starts[row], self.max_length - 1)
            counts[row] = 1
        number = max(self.next_step, self.given_up.stop if self.next_step in self.given_up else 0)
        continues = sources is None and all(
            start == (len(self.rows[row]) if row < known else 0) for row, start in enumerate(starts)
        )
        epoch = self.epoch if continues and rows == known and random.random() < 0.7 else number
        step = messages.StepRequest(number, starts, counts, NO_FORMAT, "float32", sources, epoch=epoch)
        return step, b"".join(random.choices(TOKENS, k=sum(counts)))

    def right_replay(self, random: random.Random) -> tuple[messages.ReplayRequest, bytes]:
        """A replay of what the server has, from anywhere on."""
        rows = self.rows or [[TOKENS[0]]]
        starts = [random.choice((0, 0, len(row) // 2)) if self.rows else 0 for row in rows]
        tokens = [token for row, start in zip(rows, starts, strict=True) for token in row[start:]]
        counts = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        if not tokens:
            starts, counts, tokens = [0] * len(rows), [1] * len(rows), TOKENS[: len(rows)]
        number = self.next_step + random.choice((0, 0, 1, 5))
        returns = bool(random.getrandbits(1))
        replay = messages.ReplayRequest(number, starts, counts, NO_FORMAT, "float32", None, returns, number)
        return replay, b"".join(tokens)

    def expect_step(self, message: Any, payload: bytes) -> str:
        """What the server has to do with a step of the session's client."""
        decoded = decode(message)
        if decoded is None:
            return CLOSED
        checksum = input_checksum(decoded, payload)
        if self.kept.get(decoded.step) == checksum:
            return ANSWERED
        if decoded.step in self.given_up:
            return SILENT
        if decoded.step < self.next_step or decoded.epoch not in (decoded.step, self.epoch):
            return REFUSED
        if decoded.follows is not None and decoded.follows >= self.next_step:
            return REFUSED
        if decoded.exits is not None or decoded.left is not None:
            return REFUSED
        return self._expect_tokens(decoded, decoded.sources, payload)

    def expect_push(self, message: Any, payload: bytes) -> str:
        """What the server has to say to the session's client when a peer that may do so pushes a step."""
        decoded = decode(messages.PushRequest("", self.session_id, message))
        if decoded is None or decoded.step.step > max(self.next_step, self.given_up.stop) + MAX_STEPS_AHEAD:
            return SILENT
        is_late = decoded.step.step < self.next_step  # also if it is the last one, once more
        return SILENT if is_late else self.expect_step(message, payload)

    def expect_replay(self, message: Any, payload: bytes) -> str:
        """What the server has to do with a replay."""
        decoded = decode(message)
        return CLOSED if decoded is None else self._expect_tokens(decoded, None, payload)

    def _expect_tokens(self, message: Any, sources: list[int] | None, payload: bytes) -> str:
        rows, tokens = len(message.counts), sum(message.counts)
        lists = [message.starts, sources, message.offsets, message.rope_lengths]
        if any(values is not None and len(values) != rows for values in lists):
            return REFUSED
        ends = [start + count for start, count in zip(message.starts, message.counts, strict=True)]
        if max(ends) > self.max_length or not 0 < tokens <= MAX_STEP_TOKENS:
            return REFUSED
        if not is_valid_payload(message.format, message.dtype, tokens, payload):
            return REFUSED
        known = len(self.rows)
        if sources is not None and max(sources) >= known:
            return REFUSED
        for row, start in enumerate(message.starts):
            source = sources[row] if sources is not None else row
            if start > (len(self.rows[source]) if source < known else 0):
                return REFUSED
        return UNSURE if message.offsets is not None else ANSWERED

    def note_step(self, message: Any, payload: bytes) -> None:
        """The server has computed a step."""
        decoded = decode(message)
        assert decoded is not None
        checksum = input_checksum(decoded, payload)
        if self.kept.get(decoded.step) == checksum:
            return
        self._note_tokens(decoded, decoded.sources, payload)
        self.next_step, self.epoch, self.kept = decoded.step + 1, decoded.epoch, {decoded.step: checksum}

    def note_replay(self, message: Any, payload: bytes) -> None:
        """The server has computed a replay."""
        decoded = decode(message)
        assert decoded is not None
        self._note_tokens(decoded, None, payload)
        self.next_step, self.epoch, self.kept, self.given_up = decoded.next_step, decoded.epoch, {}, range(0)

    def _note_tokens(self, message: Any, sources: list[int] | None, payload: bytes) -> None:
        tokens = tokens_of(payload)
        if (message.format, message.dtype, message.offsets) != (NO_FORMAT, "float32", None):
            self.is_certain, tokens = False, [b""] * sum(message.counts)
        rows, first = [], 0
        for row, (start, count) in enumerate(zip(message.starts, message.counts, strict=True)):
            source = sources[row] if sources is not None else row
            past = self.rows[source][:start] if source < len(self.rows) else []
            rows.append(past + tokens[first : first + count])
            first += count
        self.rows = rows
        self.sequences = max(self.sequences, len(rows))

    def note_given_up(self, first: int, end: int) -> None:
        """The server has got a `GiveUp`."""
        continues = first <= self.given_up.stop
        self.given_up = range(min(first, self.given_up.start) if continues and self.given_up else first, end)

    def forget(self) -> None:
        """The server has closed it."""
        self.is_known, self.is_certain = False, True
        self.rows, self.kept = [], {}
        self.next_step = self.epoch = 0
        self.given_up = range(0)


def decode(message: Any) -> Any:
    """The message as a server reads it; None if it is none."""
    try:
        return messages.decode_client(messages.encode(message))
    except ProtocolViolation:
        return None


def is_valid_payload(wire: WireFormat, dtype: str, tokens: int, payload: bytes) -> bool:
    """Whether a payload is that of so many tokens."""
    values = tokens * HIDDEN_SIZE
    try:
        return len(payload) == payload_bytes(values, wire, dtype) and is_finite(payload, values, wire, dtype)
    except WrongDtype:
        return False
