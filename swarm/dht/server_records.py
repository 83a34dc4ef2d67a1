"""The announcement of a server, as stored in the DHT.

A server stores exactly one record, under the key of its first block: `swarm3/<model>/<first block>`, where each owner
has one record. A reader of the whole model requests the keys of all blocks at once. (Petals stores a copy under every
block of the span; one copy carries the same information.)

The record names its model, so that it can be told whether it lies under the key of its own model and block.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Annotated, get_args

import msgspec

from swarm.data_structures import ExitConfidence, Mobility, ServerInfo, ServerState, Span, Whereabouts
from swarm.errors import InvalidSpan, ProtocolViolation, SwarmError
from swarm.transport.addresses import is_circuit, is_direct, is_ip, is_lan
from swarm.transport.dht.records import MAX_PAYLOAD_BYTES

MAX_MODEL_BLOCKS = 2048

MAX_ROUND_TRIPS = 16
"""Neighbors whose round trips one announcement may list."""

MAX_ADAPTERS = 16
"""Adapters that one announcement may list."""

MAX_ADDRESSES = 8
"""Addresses of each kind that one announcement may list."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
Block = Annotated[int, msgspec.Meta(ge=0, le=MAX_MODEL_BLOCKS)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]


class ServerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Wire form of `ServerInfo`; the types and ranges are the schema.

    Fields with their default value are left out, so that older peers that do not know a field can read most records.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    peer_id: Name
    start: Block
    end: Block
    state: ServerState
    throughput: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    cache_tokens_free: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    revision: Name
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_MODEL_BLOCKS)]
    compute_dtype: Name
    quantization: Name
    version: Name
    name: Name = ""
    forward_throughput: Rate = 0.0
    network_throughput: Rate = 0.0
    queue_delay: Seconds = 0.0
    round_trips: Annotated[tuple[tuple[Name, Seconds], ...], msgspec.Meta(max_length=MAX_ROUND_TRIPS)] = ()
    mobility: Mobility = Mobility.FREE
    relayed: bool = False
    addresses: Addresses = ()
    lan_addresses: Addresses = ()
    outer_host: Annotated[str, msgspec.Meta(max_length=45)] = ""
    relayed_peers: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0
    shares_weights: bool = False
    adapters: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()
    sparse: bool = False
    perplexity_loss: Annotated[float, msgspec.Meta(ge=-1, le=1e3)] | None = None
    exit_blocks: Annotated[tuple[Block, ...], msgspec.Meta(max_length=MAX_MODEL_BLOCKS)] = ()
    exit_confidences: Annotated[tuple[ExitConfidence, ...], msgspec.Meta(max_length=len(get_args(ExitConfidence)))] = ()


_decoder = msgspec.msgpack.Decoder(ServerRecord)
_AS_ANNOUNCED = [one.name for one in fields(ServerInfo) if one.name not in ("span", "whereabouts")]
"""Fields that record and `ServerInfo` have in common; the others are laid out in several fields of the record."""


def model_key(model: str, block: int) -> str:
    """DHT key of the servers of `model` whose span starts at `block`."""
    return f"swarm3/{model}/{block}"


def encode_announcement(model: str, info: ServerInfo) -> bytes:
    """Encode an announcement of a server of `model`. If it is too long, adapters and then round trips are left out.

    Raises `InvalidSpan` if it is still too long: the digests of so many blocks do not fit.
    """
    record = _record(model, info)
    encoded = msgspec.msgpack.encode(record)
    while len(encoded) > MAX_PAYLOAD_BYTES and (record.adapters or record.round_trips):
        if record.adapters:
            record = msgspec.structs.replace(record, adapters=record.adapters[:-1])
        else:
            record = msgspec.structs.replace(record, round_trips=record.round_trips[:-1])
        encoded = msgspec.msgpack.encode(record)
    if len(encoded) > MAX_PAYLOAD_BYTES:
        raise InvalidSpan(
            f"the announcement of blocks {info.span} takes {len(encoded)} bytes, and a record may have "
            f"{MAX_PAYLOAD_BYTES}; hold fewer blocks with --blocks"
        )
    return encoded


def _record(model: str, info: ServerInfo) -> ServerRecord:
    where = info.whereabouts
    return ServerRecord(
        model=model,
        start=info.span.start,
        end=info.span.end,
        addresses=where.addresses[:MAX_ADDRESSES],
        lan_addresses=where.lan_addresses[:MAX_ADDRESSES],
        outer_host=where.outer_host,
        **{name: getattr(info, name) for name in _AS_ANNOUNCED},
    )


def decode_announcement(data: bytes) -> tuple[str, ServerInfo]:
    """Decode and validate an announcement: the model's name, and the server. Raises `ProtocolViolation`."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ProtocolViolation(
            f"an announcement of {len(data)} bytes is too large; at most {MAX_PAYLOAD_BYTES} are allowed"
        )
    try:
        record = _decoder.decode(data)
        span = Span(record.start, record.end)
    except (msgspec.MsgspecError, UnicodeDecodeError, SwarmError) as error:
        raise ProtocolViolation(f"not a valid announcement: {error}") from None
    # A joining server has not read its weights yet.
    if len(record.digests) != span.length and (record.state is ServerState.ONLINE or record.digests):
        raise ProtocolViolation(f"an announcement of {span.length} blocks has {len(record.digests)} digests")
    if record.perplexity_loss is not None and not record.sparse:
        raise ProtocolViolation("an announcement has a loss of perplexity, but is not sparse")
    _require_valid_exits(record)
    _require_valid_addresses(record)
    where = Whereabouts(record.addresses, record.lan_addresses, record.outer_host)
    same = {name: getattr(record, name) for name in _AS_ANNOUNCED}
    return record.model, ServerInfo(span=span, whereabouts=where, **same)


def _require_valid_addresses(record: ServerRecord) -> None:
    """Other peers dial these: no host names, which would have to be resolved, and nothing of one machine only."""
    for address in record.addresses:
        if not (is_direct(address) or is_circuit(address)):
            raise ProtocolViolation(f"an announcement has {address!r}, which is not a valid address of a peer")
    for address in record.lan_addresses:
        if not is_lan(address):
            raise ProtocolViolation(f"an announcement has {address!r}, which is not an address in a local network")
    if record.outer_host and not is_ip(record.outer_host):
        raise ProtocolViolation(f"an announcement has {record.outer_host!r}, which is not a valid IP address")


def _require_valid_exits(record: ServerRecord) -> None:
    blocks, confidences = record.exit_blocks, record.exit_confidences
    if any(not record.start < block <= record.end for block in blocks):
        raise ProtocolViolation(f"an announcement of blocks {record.start}:{record.end} has exits elsewhere: {blocks}")
    if any(first >= second for first, second in pairwise(blocks)) or len(set(confidences)) < len(confidences):
        raise ProtocolViolation(f"an announcement repeats its exits, or has them out of order: {blocks}, {confidences}")
    if bool(blocks) != bool(confidences):
        raise ProtocolViolation("of exit_blocks and exit_confidences, an announcement has one without the other")
