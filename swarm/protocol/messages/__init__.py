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
    Expedite           ->                (steps that the client waits for after all)
    ReplayRequest + payload ->           (fills the cache with past inputs)
                       <-                ReplayReply + payload | Refusal
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

In a private swarm each stream begins with an exchange of its own, by which both sides prove that they are members:

    the peer that opens the stream       the peer that accepts it
                       <-                MemberChallenge
    MemberProof        ->
                       <-                MemberProof + payload | Refusal
    NewerRevocations + payload ->        (if it has seen a newer list)
"""

from swarm.protocol.messages.adapters import AdaptersStored, BlockAdapterSpec, LoraShape, PutAdapters
from swarm.protocol.messages.codec import (
    ClientMessage,
    HandshakeMessage,
    ServerMessage,
    decode_client,
    decode_handshake,
    decode_server,
    encode,
    refusal,
)
from swarm.protocol.messages.fields import (
    ADAPTER_DIGEST_BYTES,
    CHECKSUM_BYTES,
    MAX_BLOCKS_PER_REQUEST,
    MAX_EXITS,
    MAX_PEER_SESSIONS,
    MAX_PROBE_BYTES,
    MAX_SEQUENCES,
    Message,
)
from swarm.protocol.messages.link import InfoReply, InfoRequest, ProbeReply, ProbeRequest, Refusal
from swarm.protocol.messages.membership import MemberChallenge, MemberProof, NewerRevocations
from swarm.protocol.messages.session import (
    CloseSession,
    ExitTerms,
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

__all__ = [
    "ADAPTER_DIGEST_BYTES",
    "CHECKSUM_BYTES",
    "MAX_BLOCKS_PER_REQUEST",
    "MAX_EXITS",
    "MAX_PEER_SESSIONS",
    "MAX_PROBE_BYTES",
    "MAX_SEQUENCES",
    "MEMBERS_PROTOCOL_ID",
    "PROTOCOL_ID",
    "AdaptersStored",
    "BackwardReply",
    "BackwardRequest",
    "BlockAdapterSpec",
    "ClientMessage",
    "CloseSession",
    "ExitTerms",
    "Expedite",
    "ForwardReply",
    "ForwardRequest",
    "GiveUp",
    "HandshakeMessage",
    "InfoReply",
    "InfoRequest",
    "LoraShape",
    "MemberChallenge",
    "MemberProof",
    "Message",
    "NewerRevocations",
    "OpenSession",
    "ProbeReply",
    "ProbeRequest",
    "PushRequest",
    "PutAdapters",
    "Refusal",
    "ReplayReply",
    "ReplayRequest",
    "ServerMessage",
    "SessionOpened",
    "SetNeighbors",
    "StepReply",
    "StepRequest",
    "decode_client",
    "decode_handshake",
    "decode_server",
    "encode",
    "refusal",
]

PROTOCOL_ID = "/swarm/5"
"""Name of the libp2p protocol. Change the number with any change that older peers cannot read."""

MEMBERS_PROTOCOL_ID = f"{PROTOCOL_ID}/members"
"""The same protocol between members of a private swarm. Peers of one kind cannot mistake the other for a broken one."""
