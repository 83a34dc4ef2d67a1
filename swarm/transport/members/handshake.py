"""The exchange that begins every stream of a private swarm. Both sides prove membership before anything else is said.

The dialer proves first, so that the acceptor reveals nothing but a nonce to a stranger. Each signature covers both peer
ids, as authenticated by libp2p, and the nonces of both sides, so no other peer can use it, and neither peer can later.

Both sides say the number of the newest revocations that they have seen, and the one with the newer list sends it.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

from swarm.errors import MembershipNotProven, NotAMember, ProtocolViolation, remote_error
from swarm.membership.certificates import MAX_LIST_BYTES, Certificate, Purpose
from swarm.membership.membership import NONCE_BYTES, Membership, Statement
from swarm.protocol import messages
from swarm.protocol.messages import HandshakeMessage, MemberChallenge, MemberProof, NewerRevocations
from swarm.transport.stream import Stream

M = TypeVar("M", bound=HandshakeMessage)


async def prove_as_dialer(stream: Stream, own_id: str, membership: Membership) -> Certificate:
    """The dialer's side. Returns the acceptor's certificate.

    Raises:
        NotAMember: the other peer refused this one, or did not prove that it is a member itself.
        ProtocolViolation: it said something else.
        PeerLost: the stream broke.
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
    """The acceptor's side. Returns the dialer's certificate. A peer that is refused is told why.

    Raises:
        NotAMember: the dialer is not a member.
        ProtocolViolation: it said something else.
        PeerLost: the stream broke.
    """
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
