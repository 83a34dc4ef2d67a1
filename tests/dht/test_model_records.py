from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo
from swarm.dht.model_records import (
    LIST_SHARDS,
    MAX_MODEL_RECORD_BYTES,
    agreed_models,
    decode_model,
    encode_model,
    list_key,
    list_keys,
)
from swarm.dht.server_records import MAX_MODEL_BLOCKS, model_key
from swarm.errors import ProtocolViolation

RECORD = {"peer_id": "QmPeer", "model": "org/model", "blocks": 12, "revision": "main"}
infos = st.builds(ModelInfo, st.sampled_from("abc"), st.integers(1, 3), st.sampled_from("xy"))


def packed(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**RECORD, **changes})


@given(
    st.text(max_size=256), st.text(min_size=1, max_size=256), st.integers(1, MAX_MODEL_BLOCKS), st.text(max_size=256)
)
def test_what_is_written_is_what_is_read(peer, name, blocks, revision):
    info = ModelInfo(name, blocks, revision)
    data = encode_model(peer, info)
    assert len(data) <= MAX_MODEL_RECORD_BYTES
    assert decode_model(data) == (peer, info)


def test_what_breaks_the_schema():
    for changes in [
        {"model": ""},
        {"model": "m" * 257},
        {"blocks": 0},
        {"blocks": MAX_MODEL_BLOCKS + 1},
        {"blocks": True},
        {"peer_id": 7},
        {"revision": "r" * 257},
        {"future": "field"},
    ]:
        with pytest.raises(ProtocolViolation):
            decode_model(packed(**changes))


def test_no_record_at_all():
    for data in [
        b"",
        packed()[:-1],
        packed() + b"0",
        b"\x91" * 4000,
    ]:
        with pytest.raises(ProtocolViolation):
            decode_model(data)


def test_an_oversized_record_is_not_even_parsed():
    with pytest.raises(ProtocolViolation, match="too large"):
        decode_model(b"\x00" * (MAX_MODEL_RECORD_BYTES + 1))


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data):
    with contextlib.suppress(ProtocolViolation):
        decode_model(data)


def test_no_model_has_servers_under_a_key_of_the_list():
    keys = {model_key(name, block) for name in ("models", "", "-models") for block in range(LIST_SHARDS)}
    assert not keys & set(list_keys())
    assert {list_key(f"peer {n}") for n in range(200)} == set(list_keys())


@given(st.lists(st.tuples(st.sampled_from("12345678"), infos), unique_by=lambda record: record[0]), st.randoms())
def test_most_peers_are_believed(records, random):
    found = agreed_models(records)
    assert {info.name for info in found} == {info.name for _, info in records}
    votes = [info for _, info in records]
    names = [info.name for info in votes]
    for info in found:
        assert all(votes.count(info) >= votes.count(other) for other in votes if other.name == info.name)
    weights = [names.count(info.name) for info in found]
    assert weights == sorted(weights, reverse=True)
    assert agreed_models(random.sample(records, len(records))) == found


def test_a_peer_counts_once():
    liar = [("QmLiar", ModelInfo("model", blocks, "main")) for blocks in (7, 7, 7)]
    assert agreed_models([*liar, ("a", ModelInfo("model", 5, "m")), ("b", ModelInfo("model", 5, "m"))])[0].blocks == 5
