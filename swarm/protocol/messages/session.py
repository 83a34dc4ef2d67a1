"""Messages between a client and a server: sessions, stateless passes, adapters, and measuring the link."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import msgspec

from swarm.data_structures import ExitBatchRule, ExitConfidence, WireFormat
from swarm.errors import RemoteError
from swarm.models.adapters.adapter_config import MAX_LORA_RANK, MAX_PROMPT_LENGTH
from swarm.protocol.messages.fields import (
    ADAPTER_DIGEST_BYTES,
    MAX_BLOCKS_PER_REQUEST,
    MAX_EXITS,
    MAX_PROBE_BYTES,
    MAX_SEQUENCES,
    MAX_SHOWN_TABS,
    MAX_SIGNATURE_BYTES,
    MAX_STATEMENT_BYTES,
    AdapterDigests,
    Checksum,
    Count,
    Message,
    Milliseconds,
    Name,
    PerSequence,
    SessionId,
    StepNumber,
    Text,
    decoder,
)

MAX_REFUSAL_CHARACTERS = 2000


class InfoRequest(Message, frozen=True):
    """Ask a server what it is doing now."""


class InfoReply(Message, frozen=True):
    """What a server is doing now. It is also the cheapest exchange with which to measure a round trip."""

    start: Count
    end: Count
    cache_tokens_free: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    sessions: Count
    version: Name


class ProbeRequest(Message, frozen=True):
    """Measure the link: the payload (at most `MAX_PROBE_BYTES`) is thrown away, `reply_bytes` bytes come back."""

    reply_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE_BYTES)]


class ProbeReply(Message, frozen=True):
    """The answer to a probe, with the requested number of payload bytes."""


class Refusal(Message, frozen=True):
    """The request failed with a typed error (see `swarm.errors`); `step` is the number of the refused step."""

    code: Name
    message: Text
    step: Count | None = None


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An encoded statement, the key of who has signed it, in OpenSSH format, and the signature in base64."""

    statement: Annotated[bytes, msgspec.Meta(max_length=MAX_STATEMENT_BYTES)]
    public_key: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]


class Points(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Whose points a client spends, and what others owe their owner: see `swarm.trust.points`.

    `grant` lets the client do so. `tabs` are signed by those that were served.
    """

    grant: Signed
    tabs: Annotated[tuple[Signed, ...], msgspec.Meta(max_length=MAX_SHOWN_TABS)] = ()


class PrefixOf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first `length` positions of another session of the same client, which is open or was closed with `keep`."""

    session_id: SessionId
    length: StepNumber


class OpenSession(Message, frozen=True):
    """Open a session: keep attention caches for blocks [start, end), up to `max_length` tokens in each sequence.

    Cache space for `sequences` sequences is reserved now (for these blocks only, if the server can divide it); a step
    that brings more sequences reserves more. If there is not enough space, the server waits up to `wait_timeout_s`
    seconds for other sessions to end, then refuses.

    `early_exits` says that the client accepts approximate results: tokens may leave inside spans (see `ExitTerms`).
    Without it a server refuses steps that let them.

    With `points`, the session may go before those of others. Their owner is charged with what it takes.

    With `prefix`, a new session of one sequence begins with a copy of that cache, as far as the server still has it.
    """

    session_id: SessionId
    revision: Name
    start: Count
    end: Count
    max_length: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    reply_format: WireFormat
    sequences: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1
    wait_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    adapters: AdapterDigests | None = None
    early_exits: bool = False
    points: Points | None = None
    prefix: PrefixOf | None = None


class SessionOpened(Message, frozen=True):
    """The session exists. `next_step` is the number of the step that the server expects (0 for a new session).

    `tab` is the newest that the server has of the owner of the points. `begun` positions were taken from `prefix`.
    """

    next_step: Count
    tab: Signed | None = None
    begun: Count = 0


class ExitTerms(Message, frozen=True):
    """When the new token of a sequence leaves inside a span, instead of passing all blocks.

    `thresholds` names blocks, ascending, and the confidence above which a token leaves in front of each, 0 to 1. The
    client has applied everything that depends on the position already. A server ignores blocks that are not among its
    `ServerInfo.exit_blocks`, and all of them if it does not offer the confidence: computing in full is always right.
    """

    confidence: ExitConfidence
    thresholds: Annotated[
        tuple[tuple[Count, Annotated[float, msgspec.Meta(ge=0, le=1)]], ...],
        msgspec.Meta(min_length=1, max_length=MAX_EXITS),
    ]
    batch: ExitBatchRule = "row"

    def __post_init__(self) -> None:
        if any(first >= second for (first, _), (second, _) in pairwise(self.thresholds)):
            raise ValueError("the blocks of exit thresholds are not ascending")


class StepRequest(Message, frozen=True):
    """One step: new hidden states for some sequences (see `StepLayout`), payload `[tokens, hidden]` in `format`.

    An epoch is a step that does not just continue the one before (it sets sequences back, or copies them), and all
    steps that continue it; `epoch` is the number of the first. A server that has missed that one refuses the others,
    because they would build upon what was given up. The first itself says which step it `follows`: the last one before
    it that stands (None for the first of a session). A server that has missed that one refuses it: a cache that was
    filled again may lack it, and what is kept of the sequences could be wrong.

    With `exits`, the new token of each sequence (at most one) may leave inside the span. `left` says which have left
    before: for each sequence, the block in front of which its new token left, 0 if it did not. The hidden states of a
    token that left are those in front of that block; the server only fills its cache with their keys and values.

    In front of `exit_block` the client may already know what it needs of this step; 0 says that it has guessed the
    tokens, and does not wait for them. Servers that begin there or behind let steps that clients wait for go first, for
    a moment.
    """

    step: StepNumber
    starts: PerSequence
    counts: PerSequence
    format: WireFormat
    dtype: Name
    sources: PerSequence | None = None
    offsets: PerSequence | None = None
    epoch: Count = 0
    exits: ExitTerms | None = None
    left: PerSequence | None = None
    exit_block: Count | None = None
    follows: Count | None = None
    rope_lengths: PerSequence | None = None


class GiveUp(Message, frozen=True):
    """The steps from number `first` up to, but without, `end` are given up. The server does not reply.

    The server need not compute those that have not begun. It may have computed some: the next step sets them back.
    """

    first: Count
    end: Count


class StepReply(Message, frozen=True):
    """The outputs of a step, payload `[tokens, hidden]` in `format`.

    `compute_ms` is the time spent in the blocks. `input_checksum` is that of the request and payload that were computed
    (see `swarm.protocol.input_checksum`), wherever they came from. `pushed` is true if the outputs were already sent to
    the next server. `left` is that of the request, with the tokens that left in this span; None if none has left so
    far. Their outputs are their hidden states in front of the block named there. `sessions` is for how many the server
    computes at present, this one included, so that a client knows for whom a guess would be in the way.
    """

    step: Count
    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds
    input_checksum: Checksum
    pushed: bool = False
    left: PerSequence | None = None
    sessions: Count = 1


class SetNeighbors(Message, frozen=True):
    """Tell a server its neighbors in the session's route; None stands for the client. There is no reply.

    Only `previous_peer` may push steps into the session, and they may bring at most `sequences` sequences, or as many
    as the session has already. The server pushes its outputs to the session `next_session_id` at `next_peer`.
    """

    previous_peer: Name | None
    next_peer: Name | None
    next_session_id: SessionId | None
    sequences: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1


class PushRequest(Message, frozen=True):
    """A step from the previous server of the route, for the session that `client` opened. The client gets the reply."""

    client: Name
    session_id: SessionId
    step: StepRequest


class ReplayRequest(Message, frozen=True):
    """Past inputs of a session, laid out as in a `StepRequest`, to fill the cache of a server that has not seen them.

    The session's sequences become those of the request; whatever was cached beyond its starts is dropped. From now on
    the server ignores steps with a number below `next_step`; those that follow may continue `epoch`. Outputs are sent
    back only if `return_outputs` is true.
    """

    next_step: Count
    starts: PerSequence
    counts: PerSequence
    format: WireFormat
    dtype: Name
    offsets: PerSequence | None
    return_outputs: bool
    epoch: Count = 0
    rope_lengths: PerSequence | None = None


class ReplayReply(Message, frozen=True):
    """The cache holds what was replayed. Payload: `[tokens, hidden]` in `format` if outputs were requested.

    `input_checksum` is that of the request, as in a `StepReply`.
    """

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds
    input_checksum: Checksum


class ReceiptRequest(Message, frozen=True):
    """Ask for a receipt of the session up to `step`, the newest that the server has answered and that stands."""

    step: StepNumber


class Receipt(Message, frozen=True):
    """What the server has computed for the session, signed with its identity (see `swarm.trust.receipts`)."""

    statement: Annotated[bytes, msgspec.Meta(max_length=MAX_STATEMENT_BYTES)]
    public_key: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]


class SignedTab(Message, frozen=True):
    """What the owner of the session's points has had of the server in all, signed by it."""

    tab: Signed


class TabKept(Message, frozen=True):
    """The newest tab that the server has from that owner: another one if the owner has signed a larger total meanwhile,
    None if the server keeps none."""

    tab: Signed | None


class CloseSession(Message, frozen=True):
    """Close the session and free its cache.

    Of a session with one sequence, the server may keep `keep` positions until others need the room, for the next
    session of this client that names them as its `prefix`.
    """

    keep: Count = 0


class WholeSequencesRequest(Message, frozen=True):
    """Compute blocks [start, end) for packed sequences, of which the server keeps nothing.

    Payload: inputs `[sum(counts), hidden]` in `format`. The reply is in `reply_format`. `offsets`: as in `StepLayout`.
    """

    revision: Name
    start: Count
    end: Count
    counts: PerSequence
    format: WireFormat
    dtype: Name
    reply_format: WireFormat
    offsets: PerSequence | None = None
    adapters: AdapterDigests | None = None


class ForwardRequest(WholeSequencesRequest, frozen=True):
    """Compute the outputs."""


class ForwardReply(Message, frozen=True):
    """The outputs of a forward pass, payload `[sum(counts), hidden]` in `format`."""

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class BackwardRequest(WholeSequencesRequest, frozen=True):
    """Compute the gradients of a forward pass with respect to its inputs and adapters; the forward pass is repeated.

    The payload goes on with the gradients of the outputs, which have the shape of the inputs and are in `reply_format`.
    """


class BackwardReply(Message, frozen=True):
    """The gradients of a forward pass.

    Payload: the gradients of the inputs `[sum(counts), hidden]` in `format` and `dtype`, then those of all adapters in
    float32, in the order of the adapters' bytes (`swarm.protocol.adapter_encoding`).
    """

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class LoraShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape of one module's LoRA factors: A `[rank, inputs]` and B `[outputs, rank]`.

    `module` is the module's path inside the block.
    """

    module: Name
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_LORA_RANK)]
    inputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    outputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class BlockAdapterSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digest and shapes of one block's adapter: a soft prompt of `prompt_length` positions (0: none), LoRA modules."""

    digest: Annotated[bytes, msgspec.Meta(min_length=ADAPTER_DIGEST_BYTES, max_length=ADAPTER_DIGEST_BYTES)]
    prompt_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_LENGTH)]
    modules: Annotated[list[LoraShape], msgspec.Meta(max_length=64)]


class PutAdapters(Message, frozen=True):
    """Store adapters for this client: one for each block from `start` on, None for a block without an adapter.

    An adapter that is not used for some time is removed. A request that names a missing adapter is refused with
    `unknown_adapter`. Payload: the bytes of all adapters, in `dtype`, see `swarm.protocol.adapter_encoding`.
    """

    start: Count
    blocks: Annotated[list[BlockAdapterSpec | None], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS_PER_REQUEST)]
    dtype: Name


class AdaptersStored(Message, frozen=True):
    """The adapters are stored.

    The server keeps them for `lifetime_s` seconds after their last use, or less if it needs the memory.
    """

    lifetime_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


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

decode_client: Callable[[bytes], ClientMessage] = decoder(ClientMessage, "a valid request")
"""Decodes a header that a client sent. Raises `ProtocolViolation` if it is not a valid message, as all decoders do."""

decode_server: Callable[[bytes], ServerMessage] = decoder(ServerMessage, "a valid reply")


def refusal(error: RemoteError, step: int | None = None) -> Refusal:
    """The refusal that carries an error to the other peer."""
    return Refusal(error.code, str(error)[:MAX_REFUSAL_CHARACTERS], step)
