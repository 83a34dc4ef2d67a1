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

# ruff: noqa: F403  (this package is what its modules define)
from swarm.protocol.messages.fields import *
from swarm.protocol.messages.peers import *
from swarm.protocol.messages.session import *

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
