"""The gate of a private swarm's peer: every stream has to pass it, and it ends the streams of former members."""

from __future__ import annotations

import asyncio
import logging
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
"""Time limit for the whole exchange: three messages of less than a kilobyte, and sometimes a list of revocations."""

MAX_UNPROVEN = 256
MAX_UNPROVEN_OF_PEER = 8
"""Streams that may be in their first exchange at the same time: of all peers without an earlier proof, and of one. If
there are more, the peer with the most of them loses its oldest one: a member needs only one, and only for a moment."""

MAX_PROVEN_PEERS = 1024
"""Peers whose proof of membership is remembered, so that a crowd of strangers cannot shut them out."""

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
        """Set when this peer has learned a newer list of revocations."""
        self._own_id = own_id
        self._unproven: dict[str, dict[FrameStream, None]] = {}
        """The streams of each peer that have not passed yet, the oldest first."""
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
        """Have the peer that opened a stream prove its membership, and prove this one's. Raises the same as `enter`."""
        with self._counted(stream), self._watch_for_news():
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
        with self._counted(stream):
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
    def _counted(self, stream: FrameStream) -> Iterator[None]:
        """Count a stream that has not passed yet. Raises `PeerLost` if its peer has too many of them."""
        peer = stream.peer_id
        if len(self._unproven.get(peer, ())) >= MAX_UNPROVEN_OF_PEER:
            raise PeerLost(f"too many streams without a proof of membership; one of …{peer[-6:]} is closed")
        if peer not in self._proven:
            self._make_room()
        self._unproven.setdefault(peer, {})[stream] = None
        try:
            yield
        finally:
            self._forget_unproven(stream)

    def _make_room(self) -> None:
        """Close a stream of a stranger if there are too many of them."""
        strangers = [streams for peer, streams in self._unproven.items() if peer not in self._proven]
        if sum(map(len, strangers)) >= MAX_UNPROVEN:
            most = max(strangers, key=len)
            oldest = next(iter(most))
            logger.debug("too many streams without a proof of membership; one of …%s is closed", oldest.peer_id[-6:])
            self._forget_unproven(oldest)
            oldest.abort()

    def _forget_unproven(self, stream: FrameStream) -> None:
        streams = self._unproven.get(stream.peer_id, {})
        streams.pop(stream, None)
        if not streams:
            self._unproven.pop(stream.peer_id, None)

    def _remember(self, peer: str) -> None:
        """Remember that a peer has proven its membership. If there are too many, the oldest proof is forgotten."""
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
    """Wait a while until the other side closes the stream: closing it here could discard what was sent last."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_TIMEOUT_S):
            await stream.discard_incoming()
