"""Requests and answers of a hostile node of the DHT. Everything follows from the `random` that is handed in."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.crypto import RSAPrivateKey

from swarm.data_structures import ServerInfo
from swarm.dht.model_records import list_keys
from swarm.dht.server_records import encode_announcement, model_key
from swarm.transport.dht.records import MAX_LIFETIME_S, Record, key_bytes, sign, subkey_of
from swarm.transport.dht.routing_table import node_id_of

MAX_BYTES = 3 << 20
"""Of one message; libp2p's daemon carries 4 MiB."""

CLOCK_S = 1.0
DICTIONARY = 0x50

NUMBERS: tuple[float, ...] = (
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    -(2**63),
    1e300,
    math.inf,
    -math.inf,
    math.nan,
    0.5,
    5e-324,
)
TEXTS = ("", "x", "\0", "a" * 257, "\U0001f600" * 64, "float32", "online", "../..", "swarm-demo")
PICKLE = b"cos\nsystem\n(S'true'\ntR."
BYTES = (b"", b"\xc0", b"\xc1", b"\x91" * 2000, b"\xff" * 40, b"[owner:", b"]", b"\xdf\xff\xff\xff\xff", PICKLE)


@dataclass(frozen=True)
class Stranger:
    """An identity of the attacker's, as its messages need it.

    Attributes:
        peer: its id.
        key: with which it signs.
        info: a server's announcement that it could make.
    """

    peer: PeerID
    key: RSAPrivateKey
    info: ServerInfo


@dataclass
class DhtMessages:
    """Makes messages.

    Args:
        random: decides everything.
        strangers: the attacker's identities; the first one sends.
        model, blocks: what the swarm serves.
        honest: records of others that the attacker has read.
    """

    random: random.Random
    strangers: Sequence[Stranger]
    model: str
    blocks: int
    honest: Sequence[Record] = ()
    sent: list[bytes] = field(default_factory=list)
    """Requests to store that were made, to be replayed."""

    def request(self) -> tuple[str, bytes]:
        """The method and the bytes of one request."""
        method = self.random.choices(["rpc_store", "rpc_find", "rpc_ping"], [6, 3, 1])[0]
        make: dict[str, Callable[[], bytes]] = {
            "rpc_store": self._store,
            "rpc_find": lambda: self._find().SerializeToString(),
            "rpc_ping": lambda: self._ping().SerializeToString(),
        }
        data = make[method]()
        return method, self._broken(data) if self.random.random() < 0.2 else data[:MAX_BYTES]

    def answer(self, keys: Sequence[bytes]) -> bytes:
        """What a hostile node says to somebody who looks for these keys."""
        chance = self.random
        results = [self._result(key) for key in keys]
        if chance.random() < 0.2:
            results = results[: chance.randrange(len(results) + 1)] * chance.choice([1, 2, 40])
        data = dht_pb2.FindResponse(results=results, peer=self._node()).SerializeToString()
        return self._broken(data) if chance.random() < 0.2 else bytes(data[:MAX_BYTES])

    # Requests.

    def _store(self) -> bytes:
        chance = self.random
        if self.sent and chance.random() < 0.1:
            return chance.choice(self.sent)
        count = chance.choice([1, 1, 1, 2, 3, 16, 17, 0])
        records = [self._record() for _ in range(count)]
        request = dht_pb2.StoreRequest(
            keys=[record.key for record in records],
            subkeys=[msgspec.msgpack.encode(record.subkey) for record in records],
            values=[record.value for record in records],
            expiration_time=[record.expires for record in records],
            in_cache=[chance.random() < 0.1 for _ in records],
            peer=self._node(),
        )
        if records and chance.random() < 0.2:
            lists = [request.keys, request.subkeys, request.values]
            changed = chance.choice(lists)
            changed[chance.randrange(count)] = self._bytes()
        if chance.random() < 0.1:
            request.in_cache.append(True)
        data = bytes(request.SerializeToString())
        if len(self.sent) < 32:
            self.sent.append(data)
        return data

    def _find(self) -> dht_pb2.FindRequest:
        count = self.random.choice([1, 1, 2, 16, 17, 0, 1000])
        return dht_pb2.FindRequest(keys=[self._key() for _ in range(count)], peer=self._node())

    def _ping(self) -> dht_pb2.PingRequest:
        return dht_pb2.PingRequest(peer=self._node(), validate=self.random.random() < 0.3)

    def _node(self) -> dht_pb2.NodeInfo:
        own = node_id_of(self.strangers[0].peer)
        return dht_pb2.NodeInfo(node_id=self.random.choice([own, own, b"", bytes(20), bytes(5000)]))

    def _record(self) -> Record:
        """A record with at most one or two things wrong."""
        chance = self.random
        record = chance.choice(self.honest) if self.honest and chance.random() < 0.1 else self._signed()
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            record = self._changed(record)
        return record

    def _signed(self) -> Record:
        """A record that is well signed. Every other one is good: the sender's own, under its key, about the future."""
        chance = self.random
        if chance.random() < 0.5:
            stranger = self.strangers[0]
            model = chance.choice([self.model, "another", "\U0001f600"])
            payload = encode_announcement(model, stranger.info)
            return sign(model_key(model, 0), payload, time.time() + chance.choice([5, 30, 300]), stranger.key)
        return sign(self._name(), self._payload(), self._expiry(), chance.choice(self.strangers).key)

    def _changed(self, record: Record) -> Record:
        chance = self.random
        owner = subkey_of(chance.choice(self.strangers).key)
        changes: list[dict[str, object]] = [
            {"key": self._key()},
            {"expires": self._expiry()},
            {"expires": float(chance.choice(NUMBERS))},
            {"subkey": owner},
            {"subkey": owner[:-1] + b" comment]"},
            {"subkey": owner.replace(b"ssh-rsa", chance.choice([b"ssh-dss", b"ssh-ed25519", b"ssh-rsa-cert-v01"]))},
            {"subkey": self._flipped(record.subkey)},
            {"subkey": self._bytes()},
            {"value": self._flipped(record.value)},
            {"value": record.value[: chance.randrange(len(record.value) + 1)]},
            {"value": record.value + record.value},
            {"value": self._bytes()},
        ]
        return _replaced(record, chance.choice(changes))

    def _payload(self) -> bytes:
        """What a record says, well signed: often an announcement with a field that is wrong."""
        chance = self.random
        info = chance.choice(self.strangers).info
        if chance.random() < 0.1:
            return self._bytes()
        said = msgspec.msgpack.decode(encode_announcement(chance.choice([self.model, self.model, "other"]), info))
        for _ in range(chance.choice([0, 1, 1, 2])):
            name = chance.choice([*said, "unknown"])
            said[name] = self._value()
        try:
            return msgspec.msgpack.encode(said)
        except OverflowError:  # of integers, msgpack has 64 bits
            return b""

    def _value(self, depth: int = 0) -> object:
        chance = self.random
        makers: list[Callable[[], object]] = [
            lambda: chance.choice(NUMBERS),
            lambda: chance.choice(TEXTS),
            lambda: chance.choice(BYTES),
            lambda: chance.choice([None, True, False]),
            lambda: [self._value(depth + 1)] * chance.choice([0, 1, 2, 300 if depth == 0 else 3]),
            lambda: {chance.choice(TEXTS): self._value(depth + 1)},
        ]
        return chance.choice(makers[: 4 if depth > 3 else None])()

    def _expiry(self) -> float:
        now = time.time()
        return now + self.random.choice([5, 30, 60, 300, MAX_LIFETIME_S - 5, MAX_LIFETIME_S + 60, 0, -5, 1e9])

    def _name(self) -> str:
        chance = self.random
        other = chance.choice([*list_keys(), "", "swarm3", model_key(self.model, 9999), model_key("other", 0)])
        return other if chance.random() < 0.3 else model_key(self.model, chance.randrange(self.blocks))

    def _key(self) -> bytes:
        wrong = (b"", b"short", bytes(19), bytes(20), bytes(21), bytes(100_000), self.random.randbytes(20))
        return self.random.choice(wrong) if self.random.random() < 0.3 else key_bytes(self._name())

    def _bytes(self) -> bytes:
        chance = self.random
        large = chance.randbytes(chance.choice([10, 1000, 9000, 70_000])) + bytes(chance.choice([0] * 9 + [1 << 20]))
        return large if chance.random() < 0.2 else chance.choice(BYTES)

    # Answers.

    def _result(self, key: bytes) -> dht_pb2.FindResult:
        chance = self.random
        count = chance.choice([0, 1, 2, 9, 100])
        items: list[object] = [(one.subkey, one.value, one.expires) for one in self._answered(key, count)]
        if chance.random() < 0.3:
            items.insert(chance.randrange(len(items) + 1), self._value())
        latest = self._value() if chance.random() < 0.2 else time.time() + 60
        maxsize = self._value() if chance.random() < 0.3 else None
        try:
            inner = msgspec.msgpack.encode((maxsize, latest, items))
        except OverflowError:
            inner = b"\x93\xc0"
        code = chance.choice([DICTIONARY] * 8 + [0, 1, 127])
        value = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, inner))
        result = dht_pb2.FindResult(
            type=chance.choice([dht_pb2.FOUND_DICTIONARY] * 6 + [dht_pb2.FOUND_REGULAR, dht_pb2.NOT_FOUND]),
            value=chance.choice([value] * 8 + [self._flipped(value), value[: len(value) // 2], self._bytes()]),
            expiration_time=time.time() + 60,
        )
        for _ in range(chance.choice([0, 1, 20, 21, 500])):
            peer = chance.choice([chance.randbytes(34), b"\x12\x20" + chance.randbytes(32), b"", bytes(65)])
            result.nearest_peer_ids.append(peer)
            result.nearest_node_ids.append(self._key())
        return result

    def _answered(self, key: bytes, count: int) -> list[Record]:
        """A few records that were signed, and copies of them with something changed: signing takes long."""
        signed = [_replaced(self._record(), {"key": key}) for _ in range(min(count, 2))]
        return [signed[number] if number < 2 else self._changed(signed[number % 2]) for number in range(count)]

    # Bytes.

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        for _ in range(self.random.choice([1, 1, 3])):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _broken(self, data: bytes) -> bytes:
        """A message of protobuf that was cut, changed, repeated, or that is none."""
        chance = self.random
        broken = [
            self._flipped(data),
            data[: chance.randrange(len(data) + 1)],
            data * chance.choice([2, 3]),
            b"\x0b" * 5000,  # groups inside of groups
            chance.randbytes(chance.choice([1, 100, 10_000])),
            data + bytes(chance.choice([1, 300_000])),
        ]
        return chance.choice(broken)[:MAX_BYTES]


def _replaced(record: Record, changes: dict[str, object]) -> Record:
    fields = {"key": record.key, "subkey": record.subkey, "value": record.value, "expires": record.expires}
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def wrongly_stored(data: bytes, stored: Sequence[bool], sender: Stranger) -> str:
    """Why a node should not have kept what it says that it keeps of a request to store; empty if it should.

    Judged by hivemind's own validator, which knows nothing of this project's.
    """
    request = dht_pb2.StoreRequest.FromString(data)
    now = time.time()
    for number, is_kept in enumerate(stored):
        if not is_kept:
            continue
        expires = request.expiration_time[number]
        record = DHTRecord(request.keys[number], request.subkeys[number], request.values[number], expires)
        if request.in_cache[number]:
            return "it was only to be cached"
        if not now - 60 <= expires <= now + MAX_LIFETIME_S + CLOCK_S:
            return f"it would live for {expires - now} s"
        if msgspec.msgpack.decode(record.subkey) != subkey_of(sender.key):
            return "its owner is not who sent it"
        if not RSASignatureValidator(sender.key).validate(record):
            return "its signature is wrong"
    return ""
