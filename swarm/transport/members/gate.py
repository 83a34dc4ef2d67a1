"""How members of a private swarm meet: the exchange that begins every stream, the gate that has it, and greetings.

**The exchange.** Both sides prove membership before anything else is said. The dialer proves first, so that the
acceptor reveals nothing but a nonce to a stranger. Each signature covers both peer ids, as authenticated by libp2p,
and the nonces of both sides, so no other peer can use it, and neither peer can later. Both sides say the number of the
newest revocations that they have seen, and the one with the newer list sends it.

**The gate.** Every stream has to pass it, and it ends the streams of former members.

**Greetings.** Members open a stream to each other and close it again, so that the exchange passes on the newest
revocations. A peer that learns a new list greets all its neighbors at once, so a revocation spreads quickly, whichever
peer hears of it first. Each peer also greets a few others every `GREETING_PERIOD_S` seconds, in case it missed one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

from swarm.common.warn_once import WarnOnce
from swarm.errors import (
    MembershipError,
    MembershipExpired,
    MembershipNotProven,
    MembershipRevoked,
    NotAMember,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    remote_error,
)
from swarm.membership.certificates import MAX_LIST_BYTES, Certificate, Purpose
from swarm.membership.membership import NONCE_BYTES, Membership, Statement
from swarm.protocol import messages
from swarm.protocol.messages import HandshakeMessage, MemberChallenge, MemberProof, NewerRevocations
from swarm.transport.stream import FrameStream, Stream

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
        self._proven: dict[str, Certificate] = {}
        self._streams: WeakKeyDictionary[FrameStream, Certificate] = WeakKeyDictionary()

    async def enter(self, stream: FrameStream) -> None:
        """Prove this peer's membership on a stream that it opened, and have the other peer prove its own.

        Raises as `prove_as_dialer`, and `PeerLost` if the other peer does not answer in time.
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
        self._remember(stream.peer_id, certificate)

    def has_admitted(self, peer: str) -> bool:
        """Whether a peer has proven its membership on a stream that it opened, and the membership still holds."""
        try:
            self.membership.require_valid(self._proven[peer])
        except (KeyError, NotAMember):
            return False
        return True

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

    def _remember(self, peer: str, certificate: Certificate) -> None:
        """Remember that a peer has proven its membership. If there are too many, the oldest proof is forgotten."""
        self._proven.pop(peer, None)
        self._proven[peer] = certificate
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


M = TypeVar("M", bound=HandshakeMessage)


async def prove_as_dialer(stream: Stream, own_id: str, membership: Membership) -> Certificate:
    """The dialer's side. Returns the acceptor's certificate.

    Raises `NotAMember` if the other peer refused this one or did not prove its own membership, `ProtocolViolation` if
    it said something else, `PeerLost` if the stream broke.
    """
    challenge, _ = await _receive(stream, MemberChallenge)
    nonce = secrets.token_bytes(NONCE_BYTES)
    number = membership.revocations.number
    await stream.send(_proof(Purpose.DIALER, stream, own_id, membership, (challenge.nonce, nonce)))
    proof, newer = await _receive(stream, MemberProof, MAX_LIST_BYTES)
    if newer:
        membership.learn(newer)
    certificate = _verify(Purpose.ACCEPTOR, proof, stream, own_id, membership, (nonce, proof.nonce))
    if proof.nonce != challenge.nonce:
        raise MembershipNotProven(f"peer …{stream.peer_id[-6:]} answered another exchange")
    if proof.revocations < number:
        # The list that was announced to it. One learned meanwhile has a higher number, which is fine too.
        await stream.send(NewerRevocations(), membership.revocations.encoded)
    return certificate


async def admit_dialer(stream: Stream, own_id: str, membership: Membership) -> Certificate:
    """The acceptor's side. Returns the dialer's certificate; a dialer that is refused is told why. Raises as above."""
    challenge = secrets.token_bytes(NONCE_BYTES)
    await stream.send(MemberChallenge(challenge))
    try:
        proof, _ = await _receive(stream, MemberProof)
        certificate = _verify(Purpose.DIALER, proof, stream, own_id, membership, (challenge, proof.nonce))
        number, newer = membership.revocations.number, b""
        if proof.revocations < number:
            newer = membership.revocations.encoded
        await stream.send(_proof(Purpose.ACCEPTOR, stream, own_id, membership, (proof.nonce, challenge)), newer)
        if proof.revocations > number:
            _, data = await _receive(stream, NewerRevocations, MAX_LIST_BYTES)
            membership.learn(bytes(data))
            membership.require_valid(certificate)
    except (NotAMember, ProtocolViolation) as error:
        await stream.send(messages.refusal(error))
        raise
    return certificate


def _proof(
    purpose: Purpose, stream: Stream, own_id: str, membership: Membership, nonces: tuple[bytes, bytes]
) -> MemberProof:
    number = membership.revocations.number
    statement = Statement(own_id, stream.peer_id, membership.certificate, nonces, _content(number))
    return MemberProof(membership.certificate, nonces[1], membership.prove(purpose, statement), number)


def _verify(
    purpose: Purpose,
    proof: MemberProof,
    stream: Stream,
    own_id: str,
    membership: Membership,
    nonces: tuple[bytes, bytes],
) -> Certificate:
    statement = Statement(stream.peer_id, own_id, proof.certificate, nonces, _content(proof.revocations))
    return membership.verify(purpose, statement, proof.signature)


def _content(number: int) -> bytes:
    return number.to_bytes(8, "big")


async def _receive(stream: Stream, expected: type[M], max_payload: int = 0) -> tuple[M, bytes]:
    frame = await stream.receive(max_payload)
    message = messages.decode_handshake(frame.header)
    if isinstance(message, messages.Refusal):
        error = remote_error(message.code, f"peer …{stream.peer_id[-6:]} refused: {message.message}")
        # Whatever the code, it is about membership: nothing else has been asked.
        raise error if isinstance(error, NotAMember) else NotAMember(str(error))
    if not isinstance(message, expected):
        raise ProtocolViolation(f"peer …{stream.peer_id[-6:]} began with a {type(message).__name__}")
    return message, bytes(frame.payload)


GREETING_PERIOD_S = 10.0
GREETED_EACH_PERIOD = 4
GREETED_WITH_NEWS = 64
GREETINGS_AT_A_TIME = 8

Greet = Callable[[str], Awaitable[None]]
"""Opens a stream to a peer and closes it. Raises `RemoteError`."""


async def greet_all(peer_ids: Iterable[str], greet: Greet) -> dict[str, RemoteError | None]:
    """Greet peers, a few at a time. Returns what went wrong with each, or None."""
    results: dict[str, RemoteError | None] = {}
    waiting = iter(dict.fromkeys(peer_ids))

    async def greet_waiting() -> None:
        for peer in waiting:
            try:
                await greet(peer)
                results[peer] = None
            except RemoteError as error:
                results[peer] = error

    await asyncio.gather(*(greet_waiting() for _ in range(GREETINGS_AT_A_TIME)))
    return results


def require_welcome(results: dict[str, RemoteError | None]) -> None:
    """Raise `MembershipError` if no initial peer accepted this one as a member, and at least one refused it.

    If none answered at all, joining the DHT fails with an error that says so.
    """
    refusals = [error for error in results.values() if isinstance(error, NotAMember)]
    if refusals and None not in results.values():
        raise MembershipError(str(refusals[0]))


class Greetings:
    """The loop that keeps a peer's revocations up to date, and ends the streams of former members.

    Args:
        gate: this peer's.
        greet: see `Greet`.
        neighbors: ids of the peers that this one knows now.
    """

    def __init__(self, gate: MemberGate, greet: Greet, neighbors: Callable[[], Sequence[str]]) -> None:
        self._gate = gate
        self._greet = greet
        self._neighbors = neighbors
        self._warn_once = WarnOnce(logger)

    async def run(self) -> None:
        """Run until it is cancelled."""
        while True:
            has_news = False
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_PERIOD_S):
                    await self._gate.news.wait()
                    has_news = True
            self._gate.news.clear()
            self._gate.end_invalid_streams()
            try:
                self._gate.membership.require_own()
            except NotAMember as error:
                self._warn_once(f"This peer is not a member of the swarm any more: {error}")
            known = self._neighbors()
            wanted = min(GREETED_WITH_NEWS if has_news else GREETED_EACH_PERIOD, len(known))
            for result in (await greet_all(random.sample(known, wanted), self._greet)).values():
                if isinstance(result, MembershipRevoked | MembershipExpired):
                    self._warn_once(str(result))
            self._gate.end_invalid_streams()
