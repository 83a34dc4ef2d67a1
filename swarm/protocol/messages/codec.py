"""Encoding and decoding of headers: what a client may send, and what a server may answer."""

from __future__ import annotations

from typing import cast

import msgspec

from swarm.errors import ProtocolViolation, RemoteError
from swarm.protocol.messages.adapters import AdaptersStored, PutAdapters
from swarm.protocol.messages.fields import Message
from swarm.protocol.messages.link import InfoReply, InfoRequest, ProbeReply, ProbeRequest, Refusal
from swarm.protocol.messages.membership import MemberChallenge, MemberProof, NewerRevocations
from swarm.protocol.messages.session import (
    CloseSession,
    Expedite,
    GiveUp,
    OpenSession,
    PushRequest,
    ReplayReply,
    ReplayRequest,
    SessionOpened,
    SetNeighbors,
    StepReply,
    StepRequest,
)
from swarm.protocol.messages.stateless import BackwardReply, BackwardRequest, ForwardReply, ForwardRequest

MAX_REFUSAL_CHARACTERS = 2000

ClientMessage = (
    OpenSession
    | SetNeighbors
    | StepRequest
    | PushRequest
    | GiveUp
    | Expedite
    | ReplayRequest
    | CloseSession
    | ForwardRequest
    | BackwardRequest
    | PutAdapters
    | InfoRequest
    | ProbeRequest
)
ServerMessage = (
    SessionOpened
    | StepReply
    | ReplayReply
    | ForwardReply
    | BackwardReply
    | AdaptersStored
    | InfoReply
    | ProbeReply
    | Refusal
)
HandshakeMessage = MemberChallenge | MemberProof | NewerRevocations | Refusal

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder = msgspec.msgpack.Decoder(ServerMessage)
_handshake_decoder = msgspec.msgpack.Decoder(HandshakeMessage)


def encode(message: Message) -> bytes:
    """Encode a message as the bytes of a header."""
    return _encoder.encode(message)


def decode_client(header: bytes) -> ClientMessage:
    """Decode a header that a client sent. Raises `ProtocolViolation` if it is not a valid message."""
    try:
        return cast(ClientMessage, _client_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid request: {error}") from None


def decode_server(header: bytes) -> ServerMessage:
    """Decode a header that a server sent. Raises `ProtocolViolation` if it is not a valid message."""
    try:
        return cast(ServerMessage, _server_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid reply: {error}") from None


def decode_handshake(header: bytes) -> HandshakeMessage:
    """Decode a header of the exchange that begins a private swarm's streams. Raises `ProtocolViolation`."""
    try:
        return cast(HandshakeMessage, _handshake_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a message of the members' handshake: {error}") from None


def refusal(error: RemoteError, step: int | None = None) -> Refusal:
    """The refusal that carries an error to the other peer."""
    return Refusal(error.code, str(error)[:MAX_REFUSAL_CHARACTERS], step)
