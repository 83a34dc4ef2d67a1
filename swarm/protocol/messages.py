"""The typed headers of every request and reply.

msgspec decodes and checks types, ranges and sizes in one pass; whatever passes has the declared shape. What depends
on the model (hidden size, blocks held, tokens accepted) is checked by `swarm.server.sessions.handler`.

A conversation is one libp2p stream:

    client                               server
    OpenSession        ->
                       <-                SessionOpened | Refusal
    SetNeighbors       ->                (who stands before and behind this server)
    StepRequest + payload ->
                       <-                StepReply + payload | Refusal
    ReplayRequest + payload ->           (fills the cache with past inputs)
                       <-                ReplayReply + payload | Refusal
                       <-                Refusal "server_closing" at any time: find another server
    CloseSession       ->                (the cache is freed)

    server                               the next server of the route
    PushRequest + payload ->             (a step whose StepReply goes to the client)
                       <-                Refusal

    ForwardRequest + payload ->          (no session, nothing is kept)
                       <-                ForwardReply + payload | Refusal
    BackwardRequest + payload ->         (computes the activations again, keeps nothing)
                       <-                BackwardReply + payload | Refusal
    PutAdapters + payload ->             (what this peer adds to blocks, named by digests in other requests)
                       <-                AdaptersStored | Refusal

    InfoRequest        ->
                       <-                InfoReply
    ProbeRequest + payload ->
                       <-                ProbeReply + payload
"""

from __future__ import annotations

from typing import Annotated, cast

import msgspec

from swarm.data_structures import WireFormat
from swarm.errors import ProtocolViolation, RemoteError

PROTOCOL = "/swarm/1"
"""Name of the libp2p protocol. A change that old peers cannot read changes the number."""

MAX_ROWS = 4096
"""Rows that one step may carry; bounds every list in a header."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Rows = Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_ROWS)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

MAX_BLOCKS = 1024
"""Blocks that one message may speak of."""

MAX_RANK = 1024
"""Of LoRA factors; servers may take less."""

DIGEST_BYTES = 16
Digests = Annotated[
    list[Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)
]
"""The adapter of each block of a request, in order; empty bytes where a block has none."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of all headers. Encoded as a msgpack array that begins with the class name."""


class OpenSession(Message, frozen=True):
    """Reserve room for up to `max_length` tokens in each row and keep attention caches for blocks [start, end).

    Room for `rows` rows is reserved at once, for more of them when a step brings them. Where there is none the server
    refuses, after it has waited `patience` seconds for other sessions to end.
    """

    session_id: SessionId
    revision: Name
    start: Count
    end: Count
    max_length: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    reply_format: WireFormat
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = 1
    patience: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    adapters: Digests | None = None


class SessionOpened(Message, frozen=True):
    """The session exists. `next_step` is the number of the step that the server expects (0 for a new session)."""

    next_step: Count


class StepRequest(Message, frozen=True):
    """One step: new hidden states for some rows (see `StepLayout`), payload `[tokens, hidden]` in `format`."""

    step: Count
    starts: Rows
    counts: Rows
    format: WireFormat
    dtype: Name
    sources: Rows | None = None
    offsets: Rows | None = None


Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StepReply(Message, frozen=True):
    """The outputs of a step, payload `[tokens, hidden]` in `format`.

    `compute_ms` is the time spent in the blocks; `pushed` says that the next server was handed the outputs already.
    """

    step: Count
    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds
    pushed: bool = False


class SetNeighbors(Message, frozen=True):
    """Who stands before and behind this server in the session's route; None is the client itself. No reply.

    Only `previous` may push steps into the session. Outputs are pushed to the session `next_session` at `next`.
    """

    previous: Name | None
    next: Name | None
    next_session: SessionId | None


class PushRequest(Message, frozen=True):
    """A step from the server before, for the session that `client` opened. The reply goes to the client."""

    client: Name
    session_id: SessionId
    step: StepRequest


class ReplayRequest(Message, frozen=True):
    """Past inputs of a session, as in a `StepRequest`, to fill the cache of a server that has not seen them.

    The rows become those of the request, whatever was cached beyond its starts. Steps with a number below `next_step`
    are void from now on. Outputs are sent back only if they are wanted.
    """

    next_step: Count
    starts: Rows
    counts: Rows
    format: WireFormat
    dtype: Name
    offsets: Rows | None
    want_outputs: bool


class ReplayReply(Message, frozen=True):
    """The cache holds what was replayed; payload `[tokens, hidden]` in `format` if outputs were wanted."""

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class CloseSession(Message, frozen=True):
    """Free the session's cache."""


class ForwardRequest(Message, frozen=True):
    """Run blocks [start, end) over packed sequences, payload `[sum(counts), hidden]`; nothing is kept.

    `offsets`: as in `StepLayout`.
    """

    revision: Name
    start: Count
    end: Count
    counts: Rows
    format: WireFormat
    dtype: Name
    reply_format: WireFormat
    offsets: Rows | None = None
    adapters: Digests | None = None


class ForwardReply(Message, frozen=True):
    """The outputs of a forward, payload `[sum(counts), hidden]` in `format`."""

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class BackwardRequest(Message, frozen=True):
    """Gradients of the inputs and of the adapters of a forward over packed sequences, which is computed again.

    Payload: the inputs `[sum(counts), hidden]` in `format`, then the gradients of the outputs, of the same shape, in
    `gradient_format`. Other fields as in `ForwardRequest`.
    """

    revision: Name
    start: Count
    end: Count
    counts: Rows
    format: WireFormat
    dtype: Name
    gradient_format: WireFormat
    offsets: Rows | None = None
    adapters: Digests | None = None


class BackwardReply(Message, frozen=True):
    """Payload: the gradients of the inputs `[sum(counts), hidden]` in `format` and `dtype`, then those of all adapters,
    in the order of their bytes, in float32 (`swarm.protocol.adapters`)."""

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class LoraShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """LoRA factors of one module: A `[rank, inputs]` and B `[outputs, rank]`. `module`: its path inside the block."""

    module: Name
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    inputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    outputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class BlockAdapterSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is added to one block: a soft prompt of `prompt` positions (0 for none), and factors of some modules."""

    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    prompt: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)]
    modules: Annotated[list[LoraShape], msgspec.Meta(max_length=64)]


class PutAdapters(Message, frozen=True):
    """Keep these adapters for this peer, of blocks from `start` on, one a block; None for a block without.

    They leave after a time in which nothing has used them; a request that names one which is not there is refused with
    `unknown_adapter`. Payload: all their bytes, in `dtype`, see `swarm.protocol.adapters`.
    """

    start: Count
    blocks: Annotated[list[BlockAdapterSpec | None], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
    dtype: Name


class AdaptersStored(Message, frozen=True):
    """They are there, for at least `seconds` from now or from their last use if nobody needs the room."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class InfoRequest(Message, frozen=True):
    """Ask a server what it is doing now."""


class InfoReply(Message, frozen=True):
    """What a server is doing now; also the cheapest round trip for measuring a link."""

    start: Count
    end: Count
    cache_tokens_free: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    sessions: Count
    version: Name


MAX_PROBE = 1 << 20
"""Bytes that one probe may carry in either direction."""


class ProbeRequest(Message, frozen=True):
    """Measure the link: the payload (at most `MAX_PROBE` bytes) is thrown away, `reply_bytes` bytes come back."""

    reply_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE)]


class ProbeReply(Message, frozen=True):
    """The answer to a probe, with as many bytes of payload as were asked for."""


class Refusal(Message, frozen=True):
    """The request failed with a typed error (see `swarm.errors`); `step` is the number of the step that was refused."""

    code: Name
    message: Text
    step: Count | None = None


ClientMessage = (
    OpenSession
    | SetNeighbors
    | StepRequest
    | PushRequest
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

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder = msgspec.msgpack.Decoder(ServerMessage)


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode_client(header: bytes) -> ClientMessage:
    """What a client sent. Raises `ProtocolViolation` if it is no valid message."""
    try:
        return cast(ClientMessage, _client_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid request: {error}") from None


def decode_server(header: bytes) -> ServerMessage:
    """What a server answered. Raises `ProtocolViolation` if it is no valid message."""
    try:
        return cast(ServerMessage, _server_decoder.decode(header))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid reply: {error}") from None


def refusal(error: RemoteError, step: int | None = None) -> Refusal:
    """The error as it travels."""
    return Refusal(error.code, str(error)[:2000], step)
