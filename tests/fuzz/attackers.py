"""Peers that attack: several identities, and conversations with servers in which every answer is heard."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from swarm.errors import PeerLost, ProtocolViolation
from swarm.protocol import messages
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.stream import Stream
from tests.bad_peers import Anything
from tests.fuzz.kinds import Violation
from tests.fuzz.targets import ServerTarget, Targets
from tests.swarms import LOOPBACK

ANSWER_TIMEOUT_S = 45.0
"""A server that takes longer for anything that is asked here hangs."""

UNREAD = frozenset({"too_long", "memory_full"})
"""Refusals behind which a server may not read what the peer still sends, and leave it time to read the refusal."""

UNREAD_TIMEOUT_S = 5.0

FENCE = messages.InfoRequest()
Answer = tuple[messages.ServerMessage, bytes]


class Attackers:
    """Peers of a campaign, each with a libp2p daemon and an identity of its own.

    Attributes:
        peers: those that others can reach come first.
    """

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    async def open(self, targets: Targets, reachable: int, hidden: int) -> None:
        """Join the swarm with so many peers that others can reach, and so many that only dial."""

        async def join(hosts: tuple[str, ...]) -> None:
            peer = await join_network(P2PConfig(targets.bootstrap_addresses, hosts), Anything())
            self.peers.append(peer)
            if hosts:
                await peer.serve(_take_everything)

        await asyncio.gather(*(join(LOOPBACK) for _ in range(reachable)))
        await asyncio.gather(*(join(()) for _ in range(hidden)))

    async def close(self) -> None:
        """Leave."""
        await asyncio.gather(*(peer.shutdown() for peer in self.peers))
        self.peers.clear()


async def _take_everything(stream: Stream) -> None:
    """What attackers do with what servers push to them."""
    await stream.discard_incoming()


class Talk:
    """A stream to a server on which everything that comes back is heard and judged.

    Args:
        outcomes: counts answers, refusals by their code.

    Attributes:
        is_over: whether the server has ended the stream.
        sent: how many messages, without those that only ask whether all is answered.
    """

    def __init__(self, stream: Any, server: ServerTarget, outcomes: Counter[str]) -> None:
        self.stream = stream
        self.server = server
        self.is_over = False
        self.outcomes = outcomes
        self.sent = 0
        self._said: list[str] = []

    @classmethod
    async def open(cls, peer: Peer, server: ServerTarget, outcomes: Counter[str]) -> Talk:
        """Open a stream. Raises `Violation` if the server cannot be reached."""
        try:
            return cls(await peer.open_stream(server.peer_id), server, outcomes)
        except PeerLost as error:
            raise Violation(f"{server.name} accepts no stream: {error}") from None

    async def say(self, message: Any, payload: bytes = b"") -> None:
        """Send a message, and wait for nothing."""
        if message is not FENCE:
            self.sent += 1
            self._said = [*self._said[-3:], short(message)]
        try:
            await self.stream.send(message, payload)
        except PeerLost:
            self.is_over = True

    async def ask(self, message: Any, payload: bytes = b"") -> list[Answer]:
        """Send a message; all that the server says to it. The stream may be over then.

        A server answers the messages of a stream one after the other, so what comes before its answer to a question
        behind the message belongs to the message or was said without being asked.
        """
        await self.say(message, payload)
        await self.say(FENCE)
        answers: list[Answer] = []
        while True:
            may_be_unread = any(refusal.code in UNREAD for refusal in refusals(answers))
            answer = await self.hear(UNREAD_TIMEOUT_S if may_be_unread else ANSWER_TIMEOUT_S, may_be_unread)
            if answer is None or isinstance(answer[0], messages.InfoReply):
                break
            answers.append(answer)
        if isinstance(message, messages.InfoRequest) and not self.is_over:
            answers.append((await self.hear()) or _nothing())
        if not answers:
            self.outcomes["closed" if self.is_over else "not answered"] += 1
        return answers

    async def hear(self, timeout_s: float = ANSWER_TIMEOUT_S, may_be_over: bool = False) -> Answer | None:
        """What the server says next; None if the stream is over. Raises `Violation` for what no server says.

        Args:
            may_be_over: it is over as well if the server says nothing for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self.stream.receive()
        except TimeoutError:
            if may_be_over:
                self.is_over = True
                return None
            raise Violation(
                f"{self.server.name} has not answered for {ANSWER_TIMEOUT_S:.0f} s; it was sent {self._said}"
            ) from None
        except (PeerLost, ProtocolViolation) as error:
            self.is_over = True
            if isinstance(error, ProtocolViolation):
                raise Violation(f"{self.server.name} sent a frame that is none: {error}") from None
            return None
        try:
            message = messages.decode_server(frame.header)
        except ProtocolViolation as error:
            raise Violation(f"{self.server.name} sent what is no answer: {error}") from None
        if not isinstance(message, messages.InfoReply):
            refused = isinstance(message, messages.Refusal)
            self.outcomes[message.code if refused else type(message).__name__] += 1
        if isinstance(message, messages.Refusal) and message.code == "server_fault":
            raise Violation(f"{self.server.name} had a fault of its own: {message.message}")
        return message, bytes(frame.payload)

    def close(self) -> None:
        """Hang up."""
        self.stream.close()


def _nothing() -> Answer:
    raise Violation("a server did not answer a question about itself")


def short(message: Any) -> str:
    """A message as text, not all of it."""
    text = repr(message)
    return text if len(text) < 400 else f"{text[:400]}…"


def refusals(answers: Sequence[Answer]) -> list[messages.Refusal]:
    """The refusals among some answers."""
    return [message for message, _ in answers if isinstance(message, messages.Refusal)]
