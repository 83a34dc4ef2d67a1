"""Messages between peers about anything but inference: reachability, membership, weights, a ring's workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from swarm.protocol.messages.fields import MAX_BLOCKS_PER_REQUEST, Count, Message, Name, Text, decoder
from swarm.protocol.messages.session import ProbeReply, ProbeRequest, Refusal

MAX_PORTS = 4
"""Ports that one request may have tried."""

MAX_ADDRESSES = 8
"""Addresses of one peer that a message may name."""

MAX_HOLDERS = 32
"""Peers from which a worker may receive weights: the workers of a ring, and its starter."""

MAX_PARTS = 2050
"""Parts of the largest model: its blocks, the client's part, and its files."""

PART_PATTERN = r"\A(?:files|client|0|[1-9][0-9]{0,3})\Z"
"""Names of parts of a model's weights: a block's is its number (see `swarm.shared_weights`)."""

NONCE_BYTES = 32
PROOF_BYTES = 32
DIGEST_BYTES = 32

PeerId = Annotated[str, msgspec.Meta(pattern=r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ports = Annotated[list[Port], msgspec.Meta(max_length=MAX_PORTS)]
Address = Annotated[str, msgspec.Meta(max_length=128, pattern=r"\A/[!-~]*\Z")]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
PartName = Annotated[str, msgspec.Meta(pattern=PART_PATTERN)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Digests = Annotated[dict[PartName, Digest], msgspec.Meta(max_length=MAX_BLOCKS_PER_REQUEST + 2)]
Label = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f]{0,256}\Z")]
"""A name that is shown, or part of a path: at most 256 characters, none of which controls a terminal."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Block = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS_PER_REQUEST)]
DtypeName = Literal["float32", "bfloat16", "float16"]
WorkerState = Literal["idle", "receiving", "starting", "online", "failed"]


class DialBackRequest(Message, frozen=True):
    """Ask a peer to dial this one at these ports of the IP address from which it sees this stream come."""

    ports: Ports


class UnreachableNotice(Message, frozen=True):
    """Tell a peer that this one has failed to dial another, to which it may have a connection."""

    peer_id: PeerId


class LookAgain(Message, frozen=True):
    """Tell a peer that another one has failed to dial it."""


class ForgetConnections(Message, frozen=True):
    """Tell a relay to close all its connections to this peer, because this one has lost some of them."""


class PunchRequest(Message, frozen=True):
    """Ask a relay where a peer that has a place there comes from, and to tell that peer where this one does.

    Attributes:
        reverse: whether that peer is to dial this one.
    """

    peer_id: PeerId
    reverse: bool


class PunchReply(Message, frozen=True):
    """Where that peer can be dialed now."""

    address: Address


class Punch(Message, frozen=True):
    """Tell a peer that another one, which comes from this address, wants to be connected to it.

    Attributes:
        dial: whether the peer that is told is to dial. If not, the other one does.
    """

    peer_id: PeerId
    address: Address
    dial: bool


class DialBackReply(Message, frozen=True):
    """That address, and the ports at which the asking peer, and no other, has answered."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    reached: Ports


class MemberChallenge(Message, frozen=True):
    """Asks the peer that opened a stream to prove that it is a member. It says nothing else."""

    nonce: Nonce


class MemberProof(Message, frozen=True):
    """A certificate, and a signature with its key over both peer ids and both nonces.

    `revocations` is the number of the newest list that the sender has seen. If the dialer has an older one, the
    acceptor's payload is the list.
    """

    certificate: Annotated[bytes, msgspec.Meta(max_length=512)]
    nonce: Nonce
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    revocations: Count


class NewerRevocations(Message, frozen=True):
    """The payload is the list of revocations that the dialer has and the acceptor has not seen."""


class FindParts(Message, frozen=True):
    """Ask which parts of a model a peer shares. It comes first, and says what the requests behind it are about.

    Attributes:
        revision: empty for the one that the peer has.
    """

    model: Name
    revision: Name


class PartsFound(Message, frozen=True):
    """The revision that the peer has, the number of blocks of the whole model, and the digests of the parts that it
    shares."""

    revision: Name
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS - 2)]
    digests: Annotated[dict[PartName, Digest], msgspec.Meta(max_length=MAX_PARTS)]


class GetManifest(Message, frozen=True):
    """Ask for the manifest of a part."""

    part: PartName


class GetChunkDigests(Message, frozen=True):
    """Ask for the digests of the chunks of a part's items, as far as they have several."""

    part: PartName


class GetChunk(Message, frozen=True):
    """Ask for one chunk of an item."""

    part: PartName
    item: Count
    chunk: Count


class PartData(Message, frozen=True):
    """What was asked for, as the payload. Requests on a stream are answered in order."""


class WorkerChallenge(Message, frozen=True):
    """The worker's first message on each stream: who opens it has to prove that it knows the pairing secret.

    Without a secret the gate of a private swarm has proven already that it is a member.
    """

    nonce: Nonce


class PairRequest(Message, frozen=True):
    """Asks to be the worker's starter. `proof` is that of `swarm.ring.pairing`, empty where no secret is needed."""

    nonce: Nonce
    proof: Proof
    name: Label


class Paired(Message, frozen=True):
    """The worker takes its assignments from this peer and from no other."""


class StillHere(Message, frozen=True):
    """Sent by both sides every few seconds, so that each knows when the other has vanished."""


class DescribeDevice(Message, frozen=True):
    """Ask the worker what its device is."""


class Holding(Message, frozen=True):
    """The blocks [start, end) of a model that a worker is assigned now."""

    model: Label
    revision: Label
    start: Block
    end: Block


class DeviceReport(Message, frozen=True):
    """What a worker's device is.

    Attributes:
        name: shown to people.
        device: such as "cpu, 4 threads", shown to people.
        memory: bytes that blocks and cache may take, what the worker's own server holds now included.
        disk: bytes free where weights are kept.
        read_rates: for each dtype, bytes/s at which weights are read and multiplied in a decode step.
        block_seconds: what a block costs for one token beyond its weights.
        holding: what it is assigned now.
    """

    name: Label
    device: Label
    memory: Bytes
    disk: Bytes
    read_rates: Annotated[dict[DtypeName, Rate], msgspec.Meta(min_length=3)]
    block_seconds: Seconds
    holding: Holding | None = None


class WeightHolder(Message, frozen=True):
    """A peer that holds parts of the weights, and where it is dialed."""

    peer_id: PeerId
    addresses: Addresses


class Assign(Message, frozen=True):
    """Receive the weights of blocks [start, end), and serve them in the ring of these initial peers.

    Attributes:
        number: repeated in the events about this assignment.
        model, revision, blocks: as `swarm.models.checkpoints.checkpoint` has them.
        digests: of every part of the model. Nothing with another digest is used.
        total_bytes: of the parts that the worker needs.
        dtype, quant, cache_tokens: as the options of `swarm server`.
        threads: torch threads; None for the worker's own choice.
        initial_peers: where the ring is joined, with peer ids.
        holders: from which weights may come, and which may ask this worker for them.
    """

    number: Count
    model: Label
    revision: Label
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS_PER_REQUEST)]
    start: Block
    end: Block
    digests: Digests
    total_bytes: Bytes
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quant: Literal["none", "packed", "int8", "nf4"]
    cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None
    initial_peers: Annotated[Addresses, msgspec.Meta(min_length=1)]
    holders: Annotated[tuple[WeightHolder, ...], msgspec.Meta(max_length=MAX_HOLDERS)]

    def __post_init__(self) -> None:
        if not self.start < self.end <= self.blocks:
            raise ValueError(f"blocks {self.start}:{self.end} do not lie inside a model of {self.blocks}")


class WorkerEvent(Message, frozen=True):
    """What a worker does now.

    Attributes:
        number: of the assignment; 0 if there is none.
        message: why it failed.
        done, total: bytes of weights received, and asked for.
        server_id: peer id of the server that runs, which may still be that of former blocks while others arrive.
    """

    state: WorkerState
    number: Count
    message: Text = ""
    done: Bytes = 0
    total: Bytes = 0
    server_id: PeerId | None = None


class Release(Message, frozen=True):
    """End the assignment. With `unpair` also the pairing, so that another starter may come."""

    unpair: bool


class Released(Message, frozen=True):
    """The assignment has ended: the server has left the ring, and its memory is free."""


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

decode_handshake: Callable[[bytes], HandshakeMessage] = decoder(HandshakeMessage, "a message of the members' handshake")
decode_reachability: Callable[[bytes], ReachabilityMessage] = decoder(
    ReachabilityMessage, "a message about reachability"
)
decode_worker: Callable[[bytes], WorkerMessage] = decoder(WorkerMessage, "a message between a starter and its worker")
decode_weights: Callable[[bytes], WeightsMessage] = decoder(WeightsMessage, "a message about weights")
