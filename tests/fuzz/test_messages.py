"""What the campaign sends to the DHT and over HTTP: it follows from the seed, and it is hostile."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.data_structures import ServerState
from swarm.dht.server_records import encode_announcement, model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import SwarmError
from swarm.transport.dht import messages
from swarm.transport.dht.records import Accepted, RecordChecker, RecordProblem, key_bytes
from tests.fuzz.campaign import batch_random
from tests.fuzz.dht_messages import MAX_BYTES, DhtMessages, Stranger, wrongly_stored
from tests.fuzz.http_messages import OTHERS, HttpMessages
from tests.infos import server_info
from tests.transport.dht.hostile import owner_name, private_key

MODEL, BLOCKS = "demo", 12
KEYS = [key_bytes(model_key(MODEL, block)) for block in range(3)]


@pytest.fixture(scope="module")
def strangers() -> list[Stranger]:
    info = server_info(0, BLOCKS, state=ServerState.OFFLINE, digests=())
    return [
        Stranger(PeerID.from_base58(owner_name(n)), private_key(n), replace(info, peer_id=owner_name(n)))
        for n in range(2)
    ]


def test_requests_to_the_dht_are_decided_without_an_error_of_others(strangers):
    """As nodes decide, and all verdicts come up."""
    made = DhtMessages(batch_random("dht", 1, 1), strangers, MODEL, BLOCKS)
    checker = RecordChecker(AnnouncementValidator())
    seen: set[object] = set()
    for _ in range(200):
        method, data = made.request()
        assert len(data) <= MAX_BYTES
        try:
            if method == "rpc_find":
                messages.sought_keys(dht_pb2.FindRequest.FromString(data))
            elif method == "rpc_store":
                records = messages.stored_records(dht_pb2.StoreRequest.FromString(data))
                verdicts = [checker.check(record) if record is not None else None for record in records]
                seen |= {type(verdict) if isinstance(verdict, Accepted) else verdict for verdict in verdicts}
        except (SwarmError, DecodeError) as error:
            seen.add(type(error))
    assert seen >= {Accepted, RecordProblem.MALFORMED, RecordProblem.LIFETIME, RecordProblem.WRONG_KEY, DecodeError}


def test_answers_of_the_dht_are_read_without_an_error_of_others(strangers):
    made = DhtMessages(batch_random("dht", 1, 2), strangers, MODEL, BLOCKS)
    read = refused = 0
    for _ in range(40):
        data = made.answer(KEYS)
        assert len(data) <= MAX_BYTES
        try:
            for key, result in zip(KEYS, dht_pb2.FindResponse.FromString(data).results, strict=False):
                messages.neighbors_named(result)
                read += len(messages.records_found(key, result))
        except (SwarmError, DecodeError):
            refused += 1
    assert read
    assert refused


def store(record: messages.Record, in_cache: bool = False) -> bytes:
    asked = messages.store_request([record], dht_pb2.NodeInfo())
    asked.in_cache[0] = in_cache
    return bytes(asked.SerializeToString())


def test_what_should_not_have_been_stored_is_noticed(strangers):
    made = DhtMessages(random.Random(1), strangers, MODEL, BLOCKS)
    own, other = strangers
    payload = encode_announcement(MODEL, own.info)
    good = messages.Record(b"", b"", b"", 0.0)
    while good.key != key_bytes(model_key(MODEL, 0)) or payload not in good.value:
        good = made._signed()
    assert wrongly_stored(store(good), [True], own) == ""
    assert wrongly_stored(store(replace(good, expires=1e300)), [False], own) == ""
    assert "cached" in wrongly_stored(store(good, in_cache=True), [True], own)
    assert "live" in wrongly_stored(store(replace(good, expires=1e300)), [True], own)
    assert "owner" in wrongly_stored(store(good), [True], other)
    assert "signature" in wrongly_stored(store(replace(good, expires=good.expires + 1)), [True], own)


def test_requests_to_generate_never_ask_for_much():
    made = HttpMessages(batch_random("http", 1, 2), MODEL)
    for _ in range(500):
        path, body = made.body()
        json.dumps(body)
        if path in OTHERS:
            assert OTHERS[path].short.items() <= body.items()
            continue
        wanted = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        assert any(one is not None for one in wanted)
        assert not any(isinstance(one, int) and 3 < one < 2**31 for one in wanted)
