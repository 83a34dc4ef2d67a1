"""What nodes of the DHT ask each other, and the bounds on it: hivemind's protobuf messages, read strictly.

The records of a key travel as hivemind's dictionary: a msgpack extension that holds a maximum size, the latest expiry,
and a list of subkeys, values and expiries. Whatever does not have exactly this form makes the whole message invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.errors import ProtocolViolation
from swarm.transport.dht.records import KEY_BYTES, MAX_RECORD_BYTES, Record
from swarm.transport.dht.routing_table import BUCKET_NODES, node_id_of
from swarm.transport.dht.search import MAX_TARGETS

MAX_RECORDS_STORED = 16
"""Records of one store request."""

MAX_ANSWER_BYTES = 3 * 1024 * 1024
"""Records in one answer. libp2p's daemon carries 4 MiB a message; the rest is for the nodes that the answer names."""

MAX_KEYS_ANSWERED = MAX_TARGETS
MAX_RECORDS_ANSWERED = 1024
"""Records under one key that a reader takes from one answer; nodes here keep fewer."""

MAX_PEER_ID_BYTES = 64

MAX_REQUEST_BYTES = {
    "rpc_ping": 8 * 1024,
    "rpc_find": 16 * 1024,
    "rpc_store": 16 * 1024 + MAX_RECORDS_STORED * (MAX_RECORD_BYTES + 64),
}
"""How long a request may be, before any of it is read. A membership's proof takes some kilobytes."""

_DICTIONARY_CODE = 0x50
_ext_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_subkey_decoder = msgspec.msgpack.Decoder(bytes)
_items_decoder = msgspec.msgpack.Decoder(tuple[float | None, float, list[tuple[bytes, bytes, float]]])


def store_request(records: Sequence[Record], node: dht_pb2.NodeInfo) -> dht_pb2.StoreRequest:
    """Ask a node to keep the records."""
    return dht_pb2.StoreRequest(
        keys=[record.key for record in records],
        subkeys=[msgspec.msgpack.encode(record.subkey) for record in records],
        values=[record.value for record in records],
        expiration_time=[record.expires for record in records],
        in_cache=[False] * len(records),
        peer=node,
    )


def stored_records(request: dht_pb2.StoreRequest) -> list[Record | None]:
    """The records of a request; None where one is malformed or only to be cached. Raises `ProtocolViolation`."""
    lengths = {len(request.keys), len(request.subkeys), len(request.values), len(request.expiration_time)}
    if lengths != {len(request.in_cache)} or len(request.keys) > MAX_RECORDS_STORED:
        raise ProtocolViolation(
            f"a request to store has fields of {sorted(lengths)} entries: expected equal numbers of at most "
            f"{MAX_RECORDS_STORED}"
        )
    records: list[Record | None] = []
    for key, encoded, value, expires in zip(
        request.keys, request.subkeys, request.values, request.expiration_time, strict=True
    ):
        try:
            subkey = _subkey_decoder.decode(encoded)
        except msgspec.MsgspecError:
            records.append(None)
            continue
        records.append(Record(key, subkey, value, expires))
    return records


def find_request(keys: Sequence[bytes], node: dht_pb2.NodeInfo) -> dht_pb2.FindRequest:
    """Ask a node for the records under the keys, and for nodes near them."""
    return dht_pb2.FindRequest(keys=keys, peer=node)


def sought_keys(request: dht_pb2.FindRequest) -> list[bytes]:
    """The keys of a request. Raises `ProtocolViolation`."""
    if len(request.keys) > MAX_KEYS_ANSWERED or any(len(key) != KEY_BYTES for key in request.keys):
        raise ProtocolViolation(
            f"a request asks for {len(request.keys)} keys: expected at most {MAX_KEYS_ANSWERED} of {KEY_BYTES} bytes"
        )
    return list(request.keys)


def found_results(found: Sequence[Sequence[Record]]) -> list[dht_pb2.FindResult]:
    """One result for each key's records; all fit into one message, because each key has an equal share of the room."""
    return [_found_result(records, MAX_ANSWER_BYTES // len(found)) for records in found]


def _found_result(records: Sequence[Record], room: int) -> dht_pb2.FindResult:
    taken = []
    for record in records:
        room -= record.size_bytes + 24  # headers of the three fields
        if room < 0:
            break
        taken.append(record)
    if not taken:
        return dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
    latest = max(record.expires for record in taken)
    items = [(record.subkey, record.value, record.expires) for record in taken]
    data = msgspec.msgpack.encode((float("inf"), latest, items))
    value = msgspec.msgpack.encode(msgspec.msgpack.Ext(_DICTIONARY_CODE, data))
    return dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=latest)


def records_found(key: bytes, result: dht_pb2.FindResult) -> list[Record]:
    """The records of a result for `key`, not checked yet. Raises `ProtocolViolation`."""
    if result.type == dht_pb2.NOT_FOUND:
        return []
    if result.type != dht_pb2.FOUND_DICTIONARY:
        raise ProtocolViolation("an answer of the DHT holds a plain value; only signed records by their owners exist")
    try:
        extension = _ext_decoder.decode(result.value)
        if extension.code != _DICTIONARY_CODE:
            raise ProtocolViolation(f"an answer of the DHT has a value of the unknown kind {extension.code}")
        _, _, items = _items_decoder.decode(extension.data)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"an answer of the DHT is malformed: {error}") from None
    if len(items) > MAX_RECORDS_ANSWERED:
        raise ProtocolViolation(
            f"an answer of the DHT has {len(items)} records under a key; at most {MAX_RECORDS_ANSWERED} are allowed"
        )
    return [Record(key, subkey, value, expires) for subkey, value, expires in items]


def add_neighbors(result: dht_pb2.FindResult, nodes: Iterable[PeerID]) -> None:
    """Name nodes near the key of a result: their ids in the DHT and as peers."""
    for peer in nodes:
        result.nearest_node_ids.append(node_id_of(peer))
        result.nearest_peer_ids.append(peer.to_bytes())


def neighbors_named(result: dht_pb2.FindResult) -> list[PeerID]:
    """The nodes that a result names, at most as many as it may. Raises `ProtocolViolation`."""
    peers = result.nearest_peer_ids
    if len(peers) > BUCKET_NODES or any(not 0 < len(peer) <= MAX_PEER_ID_BYTES for peer in peers):
        raise ProtocolViolation(f"an answer of the DHT names {len(peers)} nodes for a key, or ids that are none")
    return [PeerID(bytes(peer)) for peer in peers]
