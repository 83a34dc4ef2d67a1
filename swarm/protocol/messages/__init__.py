"""The typed headers of every request and reply.

msgspec checks types, ranges and sizes while it decodes, so a decoded header has the declared shape. What depends on the
model (hidden size, blocks held, tokens accepted) is checked by `swarm.server.sessions.handler`.

A conversation is one libp2p stream:

    client                               server
    OpenSession        ->
                       <-                SessionOpened | Refusal
    SetNeighbors       ->                (the servers before and after this one in the route; rows of pushes)
    StepRequest + payload ->
                       <-                StepReply + payload | Refusal
    GiveUp             ->                (queued steps that need not be computed)
    ReplayRequest + payload ->           (fills the cache with past inputs)
                       <-                ReplayReply + payload | Refusal
    ReceiptRequest     ->
                       <-                Receipt | Refusal
    SignedTab          ->                (what the session's owner of points has had of the server)
                       <-                TabKept | Refusal
                       <-                Refusal "server_closing" at any time: find another server
    CloseSession       ->                (the cache is freed)

    server                               the next server of the route
    PushRequest + payload ->             (a step whose StepReply goes to the client)
                       <-                Refusal

    ForwardRequest + payload ->          (no session, nothing is kept)
                       <-                ForwardReply + payload | Refusal
    BackwardRequest + payload ->         (repeats the forward pass, keeps nothing)
                       <-                BackwardReply + payload | Refusal
    PutAdapters + payload ->             (adapters, which other requests then name by their digests)
                       <-                AdaptersStored | Refusal

    InfoRequest        ->
                       <-                InfoReply
    ProbeRequest + payload ->
                       <-                ProbeReply + payload

A peer that wants to be reached asks others over a protocol of its own:

    DialBackRequest    ->                (ports of the asking peer)
                       <-                DialBackReply | Refusal
    UnreachableNotice  ->                (a peer that cannot be dialed; nothing is answered)
    LookAgain          ->                (to that peer, by whoever has a connection to it; nothing is answered)
    ForgetConnections  ->                (to a relay, which closes its connections to the sender, and this stream)
    PunchRequest       ->                (to a relay: a peer that the sender wants to be connected to directly)
                       <-                PunchReply | Refusal
    Punch              ->                (to that peer, by the relay; nothing is answered)

A ring's starter and its workers talk over a protocol of their own (`swarm.ring`):

    starter                              worker
                       <-                WorkerChallenge
    PairRequest        ->
                       <-                Paired | Refusal
    StillHere          ->                (every few seconds; so does the worker)
    DescribeDevice     ->
                       <-                DeviceReport
    ProbeRequest + payload ->
                       <-                ProbeReply + payload
    Assign             ->
                       <-                WorkerEvent, at each change and while weights arrive
    Release            ->
                       <-                Released

Weights travel over another one:

    FindParts          ->
                       <-                PartsFound | Refusal
    GetManifest        ->
                       <-                PartData + payload | Refusal
    GetChunkDigests    ->
                       <-                PartData + payload | Refusal
    GetChunk           ->                (several may be under way)
                       <-                PartData + payload | Refusal

In a private swarm each stream begins with an exchange of its own, by which both sides prove that they are members:

    the peer that opens the stream       the peer that accepts it
                       <-                MemberChallenge
    MemberProof        ->
                       <-                MemberProof + payload | Refusal
    NewerRevocations + payload ->        (if it has seen a newer list)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from swarm.errors import ProtocolViolation, RemoteError
from swarm.protocol.messages.fields import (
    ADAPTER_DIGEST_BYTES,
    CHECKSUM_BYTES,
    MAX_BLOCKS_PER_REQUEST,
    MAX_EXITS,
    MAX_PEER_SESSIONS,
    MAX_PROBE_BYTES,
    MAX_SEQUENCES,
    MAX_SHOWN_TABS,
    MAX_SIGNATURE_BYTES,
    MAX_STATEMENT_BYTES,
    Message,
)
from swarm.protocol.messages.peers import (
    Assign,
    DescribeDevice,
    DeviceReport,
    DialBackReply,
    DialBackRequest,
    FindParts,
    ForgetConnections,
    GetChunk,
    GetChunkDigests,
    GetManifest,
    Holding,
    LookAgain,
    MemberChallenge,
    MemberProof,
    NewerRevocations,
    Paired,
    PairRequest,
    PartData,
    PartsFound,
    Punch,
    PunchReply,
    PunchRequest,
    Release,
    Released,
    StillHere,
    UnreachableNotice,
    WeightHolder,
    WorkerChallenge,
    WorkerEvent,
    WorkerState,
)
from swarm.protocol.messages.session import (
    AdaptersStored,
    BackwardReply,
    BackwardRequest,
    BlockAdapterSpec,
    CloseSession,
    ExitTerms,
    ForwardReply,
    ForwardRequest,
    GiveUp,
    InfoReply,
    InfoRequest,
    LoraShape,
    OpenSession,
    Points,
    PrefixOf,
    ProbeReply,
    ProbeRequest,
    PushRequest,
    PutAdapters,
    Receipt,
    ReceiptRequest,
    Refusal,
    ReplayReply,
    ReplayRequest,
    SessionOpened,
    SetNeighbors,
    Signed,
    SignedTab,
    StepReply,
    StepRequest,
    TabKept,
    WholeSequencesRequest,
)

__all__ = [
    "ADAPTER_DIGEST_BYTES",
    "CHECKSUM_BYTES",
    "DIAL_BACK_PROTOCOL_ID",
    "MAX_BLOCKS_PER_REQUEST",
    "MAX_EXITS",
    "MAX_PEER_SESSIONS",
    "MAX_PROBE_BYTES",
    "MAX_REFUSAL_CHARACTERS",
    "MAX_SEQUENCES",
    "MAX_SHOWN_TABS",
    "MAX_SIGNATURE_BYTES",
    "MAX_STATEMENT_BYTES",
    "MEMBERS_PROTOCOL_ID",
    "PROTOCOL_ID",
    "WEIGHTS_PROTOCOL_ID",
    "WORKER_PROTOCOL_ID",
    "AdaptersStored",
    "Assign",
    "BackwardReply",
    "BackwardRequest",
    "BlockAdapterSpec",
    "ClientMessage",
    "CloseSession",
    "DescribeDevice",
    "DeviceReport",
    "DialBackReply",
    "DialBackRequest",
    "ExitTerms",
    "FindParts",
    "ForgetConnections",
    "ForwardReply",
    "ForwardRequest",
    "GetChunk",
    "GetChunkDigests",
    "GetManifest",
    "GiveUp",
    "HandshakeMessage",
    "Holding",
    "InfoReply",
    "InfoRequest",
    "LookAgain",
    "LoraShape",
    "MemberChallenge",
    "MemberProof",
    "Message",
    "NewerRevocations",
    "OpenSession",
    "PairRequest",
    "Paired",
    "PartData",
    "PartsFound",
    "Points",
    "PrefixOf",
    "ProbeReply",
    "ProbeRequest",
    "Punch",
    "PunchReply",
    "PunchRequest",
    "PushRequest",
    "PutAdapters",
    "ReachabilityMessage",
    "Receipt",
    "ReceiptRequest",
    "Refusal",
    "Release",
    "Released",
    "ReplayReply",
    "ReplayRequest",
    "ServerMessage",
    "SessionOpened",
    "SetNeighbors",
    "Signed",
    "SignedTab",
    "StepReply",
    "StepRequest",
    "StillHere",
    "TabKept",
    "UnreachableNotice",
    "WeightHolder",
    "WeightsMessage",
    "WholeSequencesRequest",
    "WorkerChallenge",
    "WorkerEvent",
    "WorkerMessage",
    "WorkerState",
    "decode_client",
    "decode_handshake",
    "decode_reachability",
    "decode_server",
    "decode_weights",
    "decode_worker",
    "encode",
    "refusal",
]

PROTOCOL_ID = "/swarm/10"
"""Name of the libp2p protocol. Change the number with any change that older peers cannot read."""

MEMBERS_PROTOCOL_ID = f"{PROTOCOL_ID}/members"
"""The same protocol between members of a private swarm. Peers of one kind cannot mistake the other for a broken one."""

DIAL_BACK_PROTOCOL_ID = f"{PROTOCOL_ID}/dial-back"
"""By it peers find out whether others can reach them."""

WORKER_PROTOCOL_ID = f"{PROTOCOL_ID}/worker"
"""By it a ring's starter sets up its workers."""
WEIGHTS_PROTOCOL_ID = f"{PROTOCOL_ID}/weights"
"""By it peers get a model's weights from each other."""

MAX_REFUSAL_CHARACTERS = 2000

ClientMessage = (
    OpenSession
    | SetNeighbors
    | StepRequest
    | PushRequest
    | GiveUp
    | ReplayRequest
    | ReceiptRequest
    | SignedTab
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
    | Receipt
    | TabKept
    | ForwardReply
    | BackwardReply
    | AdaptersStored
    | InfoReply
    | ProbeReply
    | Refusal
)
HandshakeMessage = MemberChallenge | MemberProof | NewerRevocations | Refusal
ReachabilityMessage = (
    DialBackRequest
    | DialBackReply
    | UnreachableNotice
    | LookAgain
    | ForgetConnections
    | PunchRequest
    | PunchReply
    | Punch
    | Refusal
)
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


def _decoder(kinds: Any, what: str) -> Callable[[bytes], Any]:
    """A function that decodes the headers of one conversation, and raises `ProtocolViolation` for anything else."""
    decode = msgspec.msgpack.Decoder(kinds).decode

    def decode_or_refuse(header: bytes) -> Any:
        try:
            return decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"not {what}: {error}") from None

    return decode_or_refuse


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encodes a message as the bytes of a header."""

decode_client: Callable[[bytes], ClientMessage] = _decoder(ClientMessage, "a valid request")
"""Decodes a header that a client sent. Raises `ProtocolViolation` if it is not a valid message, as all of these do."""

decode_server: Callable[[bytes], ServerMessage] = _decoder(ServerMessage, "a valid reply")
decode_handshake: Callable[[bytes], HandshakeMessage] = _decoder(
    HandshakeMessage, "a message of the members' handshake"
)
decode_reachability: Callable[[bytes], ReachabilityMessage] = _decoder(
    ReachabilityMessage, "a message about reachability"
)
decode_worker: Callable[[bytes], WorkerMessage] = _decoder(WorkerMessage, "a message between a starter and its worker")
decode_weights: Callable[[bytes], WeightsMessage] = _decoder(WeightsMessage, "a message about weights")


def refusal(error: RemoteError, step: int | None = None) -> Refusal:
    """The refusal that carries an error to the other peer."""
    return Refusal(error.code, str(error)[:MAX_REFUSAL_CHARACTERS], step)
