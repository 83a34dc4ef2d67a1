"""Streams of a hostile peer: it lies on them where a `Mischief` says so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.protocol.framing import Frame, encode_prefix
from swarm.protocol.messages import Message, encode
from swarm.routing.peer_health import PeerFailure, PeerHealth
from swarm.transport.stream import FrameStream
from tests.bad_peers import Bytes
from tests.fuzz.replies.lies import HangUp, Lie, Pause, Utterance, tell

MAX_PAST = 30
MAX_REMEMBERED_BYTES = 1 << 16


ABOUT: tuple[type[Message] | None, ...] = (
    *[None] * 8,
    messages.PushRequest,
    messages.PushRequest,
    messages.StepReply,
    messages.StepReply,
    messages.ReplayReply,
    messages.SessionOpened,
    messages.Refusal,
)
"""What lies of one conversation are about; None: anything."""


class Mischief:
    """When hostile peers lie, and how.

    Attributes:
        enabled: nothing is a lie unless this is true.
        sent: messages that hostile peers have sent, or were to send.
        lies: how many of each kind.
        log: those of this conversation, in words.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.sent = 0
        self.lies: Counter[str] = Counter()
        self.log: list[str] = []
        self._chance = random.Random(0)
        self._patience, self._rate, self._mercy = 0, 1.0, 0
        self._about: type[Message] | None = None
        self._told: list[Lie] = []
        self._past: deque[Frame] = deque(maxlen=MAX_PAST)

    def begin(self, chance: random.Random) -> None:
        """Another conversation begins: when the first lie comes, how many then, and what about."""
        self._chance = chance
        self._told.clear()
        self.log.clear()
        self._past.clear()
        self._patience = chance.choice([0, 0, 0, 1, 2, 3, 4, 6, 9, 14])
        self._rate = chance.choice([0.1, 0.4, 1.0])
        self._mercy = chance.choice([0, 1, 3, 5])
        self._about = chance.choice(ABOUT)
        self.enabled = True

    def make_forgiving(self, health: PeerHealth, hostile: Collection[str]) -> None:
        """Let a client forget some failures of hostile servers at once, or it would hardly ever ask them again."""
        record = health.record_failure

        def record_failure(peer_id: str, reason: PeerFailure, now: float) -> float:
            until = record(peer_id, reason, now)
            if peer_id in hostile and self._mercy:
                self._mercy -= 1
                health._records.pop(peer_id, None)
            return until

        health.record_failure = record_failure  # type: ignore[method-assign]

    @property
    def may_deceive(self) -> bool:
        """Whether somebody may have taken other values for right ones in this conversation.

        A client gets its copy of an honest reply before anything that another server makes of a wrong push, so pushes
        deceive only together with other lies.
        """
        pushed = sum(lie.is_pushed for lie in self._told)
        return any(lie.deceives for lie in self._told) or 0 < pushed < len(self._told)

    def lie(self, peer_id: str, message: Message, payload: Bytes) -> Lie | None:
        """What is sent to a peer instead of a message; None for the message itself."""
        if not self.enabled:
            return None
        self.sent += 1
        right = Frame(encode(message), bytes(payload))
        lie = self._choose(message, right)
        if len(right.payload) < MAX_REMEMBERED_BYTES:
            self._past.append(right)
        if lie is not None:
            self.sent += max(0, sum(not isinstance(one, Pause | HangUp) for one in lie.utterances) - 1)
            self.lies[lie.name] += 1
            self._told.append(lie)
            self.log.append(f"{lie.name} for {type(message).__name__} to …{peer_id[-4:]}: {_in_words(lie)}")
        return lie

    def _choose(self, message: Message, right: Frame) -> Lie | None:
        if self._patience > 0:
            self._patience -= 1
            return None
        if self._about is not None and not isinstance(message, self._about):
            return None
        if self._chance.random() > self._rate:
            return None
        return tell(self._chance, message, right, self._past)


class HostileStream:
    """A stream on which mischief is done to what is sent."""

    def __init__(self, stream: FrameStream, mischief: Mischief) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._mischief = mischief

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, message: Message, payload: Bytes = b"", timeout_s: float | None = None) -> None:
        lie = self._mischief.lie(self.peer_id, message, payload)
        if lie is None:
            await self._stream.send(message, payload, timeout_s)
            return
        for utterance in lie.utterances:
            await self._utter(utterance)

    async def _utter(self, utterance: Utterance) -> None:
        match utterance:
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case HangUp():
                self._stream.close()
            case Frame(header, payload):
                await self._write(encode_prefix(len(header), len(payload)) + bytes(header) + bytes(payload))
            case bytes():
                await self._write(utterance)

    async def _write(self, data: bytes) -> None:
        writer = self._stream._writer
        try:
            writer.write(data)
            await writer.drain()
        except (OSError, RuntimeError) as error:
            raise PeerLost(f"the one who is lied to has gone: {error}") from None


def _in_words(lie: Lie) -> str:
    def words(one: Utterance) -> str:
        match one:
            case Frame(header, payload):
                return f"{bytes(header)[:60]!r}+{len(payload)}"
            case bytes():
                return f"{one[:30]!r}({len(one)})"
            case _:
                return str(one)

    return ", ".join(map(words, lie.utterances)) or "nothing"
