"""Encoding and decoding of headers: what a client may send, and what a server may answer."""

from __future__ import annotations

from typing import cast

import msgspec

from swarm.errors import ProtocolViolation, RemoteError
from swarm.protocol.messages.adapters import AdaptersStored, PutAdapters
from swarm.protocol.messages.fields import Message
from swarm.protocol.messages.link import InfoReply, InfoRequest, ProbeReply, ProbeRequest, Refusal
from swarm.protocol.messages.membership import MemberChallenge, MemberProof, NewerRevocations
from swarm.protocol.messages.reachability import (
    DialBackReply,
    DialBackRequest,
    ForgetConnections,
    LookAgain,
    UnreachableNotice,
)
from swarm.protocol.messages.session import (
    CloseSession,
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
from swarm.protocol.messages.weights import FindParts, GetChunk, GetChunkDigests, GetManifest, PartData, PartsFound
from swarm.protocol.messages.worker import (
    Assign,
    DescribeDevice,
    DeviceReport,
    Paired,
    PairRequest,
    Release,
    Released,
    StillHere,
    WorkerChallenge,
    WorkerEvent,
)

MAX_REFUSAL_CHARACTERS = 2000

ClientMessage = (
    OpenSession
    | SetNeighbors
    | StepRequest
    | PushRequest
    | GiveUp
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
ReachabilityMessage = DialBackRequest | DialBackReply | UnreachableNotice | LookAgain | ForgetConnections | Refusal
WorkerMessage = (
    WorkerChallenge
    | PairRequest
    | Paired
    | StillHere
    | DescribeDevice
    | DeviceReport
    | ProbeRequest
    | ProbeReply
    | Assign
    | WorkerEvent
    | Release
    | Released
    | Refusal
)
WeightsMessage = FindParts | PartsFound | GetManifest | GetChunkDigests | GetChunk | PartData | Refusal

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder = msgspec.msgpack.Decoder(ServerMessage)
_handshake_decoder = msgspec.msgpack.Decoder(HandshakeMessage)
_reachability_decoder = msgspec.msgpack.Decoder(ReachabilityMessage)
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_weights_decoder = msgspec.msgpack.Decoder(WeightsMessage)


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


def decode_reachability(header: bytes) -> ReachabilityMessage:
    """Decode a header by which peers find out whether they can be reached. Raises `ProtocolViolation`."""
    try:
        return cast(ReachabilityMessage, _reachability_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a message about reachability: {error}") from None


def decode_worker(header: bytes) -> WorkerMessage:
    """Decode a header that passes between a ring's starter and a worker. Raises `ProtocolViolation`."""
    try:
        return cast(WorkerMessage, _worker_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a message between a starter and its worker: {error}") from None


def decode_weights(header: bytes) -> WeightsMessage:
    """Decode a header by which peers get weights from each other. Raises `ProtocolViolation`."""
    try:
        return cast(WeightsMessage, _weights_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a message about weights: {error}") from None


def refusal(error: RemoteError, step: int | None = None) -> Refusal:
    """The refusal that carries an error to the other peer."""
    return Refusal(error.code, str(error)[:MAX_REFUSAL_CHARACTERS], step)
