"""Receipts: right ones are believed, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli.__main__ import main
from swarm.data_structures import Span, WireFormat
from swarm.errors import ProtocolViolation, ReceiptFileError
from swarm.protocol.messages import Receipt
from swarm.transport.identity import Identity, load_or_create
from swarm.trust.receipts import (
    MAX_FILE_BYTES,
    ServedBlocks,
    Statement,
    make_statement,
    read_receipt,
    read_receipts,
    report_on,
    require_same,
    sign_statement,
    write_receipts,
)
from swarm.trust.session_record import Totals
from tests.infos import server_info

TOTALS = Totals(9, 7, 40, 0, b"g" * 32, b"o" * 32)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("identity") / "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("identity") / "other")


def statement(signer: Identity, start: int = 0, end: int = 4, totals: Totals = TOTALS, client: str = "me") -> Statement:
    blocks = ServedBlocks.of(server_info(0, 8, signer.peer_id), Span(start, end))
    return make_statement(signer.peer_id, client, b"a session of 16B", blocks, WireFormat.NONE, None, False, totals)


def signed(said: Statement, signer: Identity) -> Receipt:
    return sign_statement(said, signer.sign)


def test_a_right_receipt(one):
    receipt = signed(statement(one), one)
    require_same(receipt, statement(one))
    read = read_receipt(receipt)
    assert read.signed_at > 1_700_000_000
    assert (read.server, read.span, read.tokens) == (one.peer_id, Span(0, 4), 40)


def test_another_peer_cannot_sign_for_a_server(one, other):
    with pytest.raises(ProtocolViolation, match="is signed by"):
        read_receipt(signed(statement(one), other))


def test_a_signature_for_something_else_is_none(one):
    encoded = signed(statement(one), one).statement
    with pytest.raises(ProtocolViolation, match="signature"):
        read_receipt(Receipt(encoded, *one.sign(encoded)))


@given(st.data())
def test_every_bit_counts(one, data):
    receipt = signed(statement(one), one)
    name = data.draw(st.sampled_from(["statement", "public_key", "signature"]))
    content = bytearray(getattr(receipt, name))
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    if name == "signature" and bytes(content).rstrip(b"=") == receipt.signature.rstrip(b"="):
        return
    try:
        read = read_receipt(msgspec.structs.replace(receipt, **{name: bytes(content)}))
    except ProtocolViolation:
        return
    # Base64 leaves bits of its last letter unused.
    assert name == "signature"
    assert read == read_receipt(receipt)


@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=400))
def test_garbage_is_refused_with_the_right_error(said, key, signature):
    with pytest.raises(ProtocolViolation):
        read_receipt(Receipt(said, key, signature))


OTHER_CLAIMS: dict[str, Callable[[Statement], Statement]] = {
    "session_id": lambda said: msgspec.structs.replace(said, session_id=b"another session!"),
    "client": lambda said: msgspec.structs.replace(said, client="somebody"),
    "blocks": lambda said: msgspec.structs.replace(
        said, blocks=msgspec.structs.replace(said.blocks, quantization="int8")
    ),
    "given": lambda said: msgspec.structs.replace(said, given=b"x" * 32),
    "gave": lambda said: msgspec.structs.replace(said, gave=b"x" * 32),
    "step, steps, tokens": lambda said: msgspec.structs.replace(said, step=8, steps=6, tokens=39),
    "early_exits": lambda said: msgspec.structs.replace(said, early_exits=True),
    "adapters": lambda said: msgspec.structs.replace(said, adapters=bytes(32)),
}


@pytest.mark.parametrize("fields", OTHER_CLAIMS)
def test_a_receipt_of_something_else(one, fields):
    """A receipt of another session, of less, or with other weights."""
    said = OTHER_CLAIMS[fields](statement(one))
    with pytest.raises(ProtocolViolation, match=f"record in: {fields}$"):
        require_same(signed(said, one), statement(one))


def test_weights_count_one_by_one():
    server = server_info(2, 6, digests=("a", "b", "c", "d"))
    assert ServedBlocks.of(server, Span(3, 5)) == ServedBlocks.of(
        replace(server, span=Span(3, 5), digests=("b", "c")), Span(3, 5)
    )
    assert ServedBlocks.of(server, Span(3, 5)).weights != ServedBlocks.of(server, Span(4, 6)).weights


# Files


def verify(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["receipt", "verify", str(path)])
    return result.exit_code, result.output


def test_a_file_of_a_route(one, other, tmp_path):
    path = tmp_path / "receipts.json"
    behind = replace(TOTALS, given=TOTALS.gave, gave=b"z" * 32)
    receipts = [signed(statement(one), one), signed(statement(other, 4, 8, behind), other)]
    write_receipts(path, receipts)
    assert read_receipts(path) == receipts
    code, output = verify(path)
    assert code == 0
    assert "blocks 0:4  40 tokens in 7 steps, float32, weights none" in output
    assert f"signed by {other.peer_id}" in output
    assert "2 signatures are right, and each was given what the one before it gave." in output


def test_servers_that_contradict_each_other(one, other):
    receipts = [signed(statement(one), one), signed(statement(other, 4, 8), other)]
    assert report_on(receipts).problems == (
        "blocks 0:4 and 4:8: what the second server was given is not what the first one gave",
    )
    receipts[1] = signed(statement(other, 4, 8, client="somebody"), other)
    assert "different clients" in report_on(receipts).problems[0]


def test_what_cannot_be_compared(one, other):
    replayed = replace(TOTALS, replayed_tokens=3)
    receipts = [signed(statement(one), one), signed(statement(other, 4, 8, replayed), other)]
    report = report_on(receipts)
    assert not report.problems
    assert "replay" in report.notes[0]
    report = report_on([receipts[0], signed(statement(other, 5, 8), other)])
    assert not report.problems
    assert report.notes == ("blocks 0:4 and 5:8 do not follow one another",)


def test_a_file_that_was_changed(one, tmp_path):
    path = tmp_path / "receipts.json"
    write_receipts(path, [signed(statement(one), one)])
    content = json.loads(path.read_text())
    content["receipts"][0]["signature"] = content["receipts"][0]["signature"][::-1]
    path.write_text(json.dumps(content))
    code, output = verify(path)
    assert code == 1
    assert "WRONG: receipt 1: the signature" in output


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 2, "receipts": []}',
        b'{"format": 1, "receipts": [{"statement": "!", "public_key": "", "signature": ""}]}',
        b'{"format": 1, "receipts": [{}]}',
        b"\xff\xfe",
        b" " * (MAX_FILE_BYTES + 1),
    ],
    ids=["empty", "list", "future", "base64", "fields", "binary", "large"],
)
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "receipts.json"
    path.write_bytes(content)
    with pytest.raises(ReceiptFileError, match=r"receipts\.json"):
        read_receipts(path)
    code, output = verify(path)
    assert code == 2, output


def test_no_file_and_an_empty_one(tmp_path):
    code, output = verify(tmp_path / "nothing")
    assert code == 2
    assert "No such file" in output
    path = tmp_path / "receipts.json"
    write_receipts(path, [])
    assert verify(path) == (1, "The file has no receipts.\n")
