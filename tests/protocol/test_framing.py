from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation
from swarm.protocol.framing import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PREFIX_BYTES, decode_prefix, encode_prefix


@given(st.integers(0, MAX_HEADER_BYTES), st.integers(0, MAX_PAYLOAD_BYTES))
def test_lengths_within_the_limits_arrive(header, payload):
    prefix = encode_prefix(header, payload)
    assert len(prefix) == PREFIX_BYTES == 12
    assert decode_prefix(prefix) == (header, payload)


def test_lengths_are_big_endian():
    assert encode_prefix(1, 2) == b"\0\0\0\x01" + b"\0\0\0\0\0\0\0\x02"


@given(st.integers(MAX_HEADER_BYTES + 1, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_beyond_the_limit(header, payload):
    with pytest.raises(ProtocolViolation, match=f"header of {header} bytes"):
        decode_prefix(struct.pack(">IQ", header, payload))


@given(st.integers(0, MAX_HEADER_BYTES), st.integers(0, 2**40), st.data())
def test_a_payload_beyond_the_readers_own_limit(header, limit, data):
    payload = data.draw(st.integers(limit + 1, 2**64 - 1))
    with pytest.raises(ProtocolViolation, match=f"payload of {payload} bytes"):
        decode_prefix(struct.pack(">IQ", header, payload), max_payload=limit)


def test_a_payload_of_exactly_the_limit():
    assert decode_prefix(encode_prefix(1, 100), max_payload=100) == (1, 100)
    with pytest.raises(ProtocolViolation):
        decode_prefix(encode_prefix(1, MAX_PAYLOAD_BYTES + 1))


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_any_prefix_is_decoded_or_refused(prefix):
    try:
        header, payload = decode_prefix(prefix)
    except ProtocolViolation:
        return
    assert header <= MAX_HEADER_BYTES
    assert payload <= MAX_PAYLOAD_BYTES
