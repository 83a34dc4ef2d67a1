"""The gate of a peer of a private swarm: every stream passes it, and streams of those who are no longer members end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from swarm.errors import NotAMember, PeerLost, PeerTimeout
from swarm.membership.certificates import Certificate
from swarm.membership.membership import Membership
from swarm.protocol import messages
from swarm.transport.members.handshake import admit_dialer, prove_as_dialer
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit for the whole exchange: three messages of less than a kilobyte, and a list of revocations at times."""

MAX_UNPROVEN = 256
MAX_UNPROVEN_OF_PEER = 8
"""Streams that may be in their first exchange at the same time: of all peers that never proved anything, and of one."""

MAX_PROVEN_PEERS = 1024
"""Peers that are remembered to have proven their membership, so that a crowd of strangers cannot shut them out."""

REFUSAL_TIMEOUT_S = 2.0
"""How long a stranger's stream stays open after the refusal, so that it can be read."""

STRANGER_REFUSED = "this swarm is private: ask the person who runs it for an invite, and pass it with --membership"


class MemberGate:
    """Proves this peer's membership, and asks others for theirs.

    Args:
        membership: this peer's.
        own_id: its peer id.
    """

    def __init__(self, membership: Membership, own_id: str) -> None:
        self.membership = membership
        self.news = asyncio.Event()
        """Set when a newer list of revocations has been learnt."""
        self._own_id = own_id
        self._unproven: Counter[str] = Counter()
        self._proven: dict[str, None] = {}
        self._streams: WeakKeyDictionary[FrameStream, Certificate] = WeakKeyDictionary()

    async def enter(self, stream: FrameStream) -> None:
        """Prove this peer's membership on a stream that it opened, and have the other peer prove its own.

        Raises:
            NotAMember: the other peer refused this one, or is not a member itself.
            ProtocolViolation: it said something else.
            PeerLost: it did not answer in time, or the stream broke.
        """
        with self._watch_for_news():
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    certificate = await prove_as_dialer(stream, self._own_id, self.membership)
            except TimeoutError:
                raise PeerTimeout(
                    f"peer …{stream.peer_id[-6:]} did not prove its membership within {HANDSHAKE_TIMEOUT_S:.0f} s"
                ) from None
        self._streams[stream] = certificate

    async def admit(self, stream: FrameStream) -> None:
        """Have the peer that opened a stream prove its membership, and prove this one's. Raises as `enter`."""
        with self._counted(stream.peer_id), self._watch_for_news():
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    certificate = await admit_dialer(stream, self._own_id, self.membership)
            except TimeoutError:
                raise PeerTimeout(f"peer …{stream.peer_id[-6:]} did not prove its membership in time") from None
            except NotAMember:
                await _let_read(stream)
                raise
        self._streams[stream] = certificate
        self._remember(stream.peer_id)

    async def refuse_stranger(self, stream: FrameStream) -> None:
        """Answer a stream of the open protocol with a refusal, whatever it asks. Raises `PeerLost`."""
        with self._counted(stream.peer_id):
            await stream.send(messages.refusal(NotAMember(STRANGER_REFUSED)))
            await _let_read(stream)

    def end_invalid_streams(self) -> None:
        """Abort the streams of members whose certificate has expired or was revoked since they were opened."""
        for stream, certificate in list(self._streams.items()):
            try:
                self.membership.require_valid(certificate)
            except NotAMember as error:
                logger.debug("a stream of …%s ends: %s", stream.peer_id[-6:], error)
                del self._streams[stream]
                stream.abort()

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """While a stream has not passed. Raises `PeerLost` if there are too many of them."""
        strangers = self._unproven.total() if peer not in self._proven else 0
        if self._unproven[peer] >= MAX_UNPROVEN_OF_PEER or strangers >= MAX_UNPROVEN:
            raise PeerLost(f"too many streams without a proof of membership; one of …{peer[-6:]} is closed")
        self._unproven[peer] += 1
        try:
            yield
        finally:
            self._unproven[peer] -= 1
            if not self._unproven[peer]:
                del self._unproven[peer]

    def _remember(self, peer: str) -> None:
        """A peer has proven its membership. If there are too many, the one whose proof is oldest is forgotten."""
        self._proven.pop(peer, None)
        self._proven[peer] = None
        if len(self._proven) > MAX_PROVEN_PEERS:
            del self._proven[next(iter(self._proven))]

    @contextmanager
    def _watch_for_news(self) -> Iterator[None]:
        number = self.membership.revocations.number
        try:
            yield
        finally:
            if self.membership.revocations.number > number:
                self.news.set()


async def _let_read(stream: FrameStream) -> None:
    """Wait until the other side closes the stream, for a while: closing it here could discard what was sent last."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_TIMEOUT_S):
            await stream.discard_incoming()
