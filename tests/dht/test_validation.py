"""What a record of the swarm may say, and under which key. Signatures are in tests/transport/dht/test_records."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo, ServerInfo
from swarm.dht import model_records
from swarm.dht.server_records import encode_announcement, model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.dht.records import RecordProblem, key_bytes
from tests.infos import server_info

RULES = AnnouncementValidator()
ALICE, MALLORY = "QmAlice", "QmMallory"
INFO: ServerInfo = server_info(2, 4, ALICE)
KEY = key_bytes(model_key("model", 2))
NAMED = model_records.encode_model(ALICE, ModelInfo("model", 12, "main"))


def test_an_announcement_lies_under_the_key_of_its_model_and_first_block():
    payload = encode_announcement("model", INFO)
    assert RULES.check(KEY, ALICE, payload) is None
    for name in (model_key("model", 3), model_key("model", 0), model_key("another", 2), model_records.list_key(ALICE)):
        assert RULES.check(key_bytes(name), ALICE, payload) is RecordProblem.WRONG_KEY
    assert RULES.check(b"", ALICE, payload) is RecordProblem.WRONG_KEY


def test_a_model_record_lies_under_the_key_of_its_owner():
    assert RULES.check(key_bytes(model_records.list_key(ALICE)), ALICE, NAMED) is None
    others = set(model_records.list_keys()) - {model_records.list_key(ALICE)}
    for name in (*others, model_key("model", 2)):
        assert RULES.check(key_bytes(name), ALICE, NAMED) is RecordProblem.WRONG_KEY


def test_nobody_speaks_in_another_peers_name():
    assert RULES.check(KEY, MALLORY, encode_announcement("model", INFO)) is RecordProblem.WRONG_OWNER
    assert RULES.check(key_bytes(model_records.list_key(ALICE)), MALLORY, NAMED) is RecordProblem.WRONG_OWNER


def test_a_payload_that_is_neither():
    for payload in [
        b"",
        b"garbage",
        b"\xc0",
        b"\x91" * 3000,
        b"\xdd\xff\xff\xff\xff",
    ]:
        assert RULES.check(KEY, ALICE, payload) is RecordProblem.MALFORMED


@given(st.binary(max_size=200), st.binary(max_size=24), st.text(max_size=5))
@settings(deadline=None)
def test_garbage_is_refused_without_an_exception(payload, key, owner):
    assert isinstance(RULES.check(key, owner, payload), RecordProblem)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_announcement_is_refused_or_lies_under_its_own_key(data):
    payload = bytearray(encode_announcement("model", INFO))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    keys = (KEY, key_bytes(model_key("model", 3)))
    verdicts = [RULES.check(key, ALICE, bytes(payload)) for key in keys]
    assert any(isinstance(verdict, RecordProblem) for verdict in verdicts)  # it cannot lie under both
