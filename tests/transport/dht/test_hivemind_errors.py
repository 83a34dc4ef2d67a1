"""Whatever hivemind's DHT raises becomes one typed error."""

from __future__ import annotations

import asyncio

import pytest
from hivemind.proto import dht_pb2

from swarm.errors import DhtError, ProtocolViolation
from swarm.transport.dht.hivemind_errors import raise_dht_errors


def test_what_the_dht_raises_becomes_a_typed_error():
    with pytest.raises(DhtError, match=r"reading the announcements failed: RuntimeError\('gone'\)") as caught:
        with raise_dht_errors("reading the announcements"):
            raise RuntimeError("gone")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_answer_that_is_none_is_the_fault_of_who_sent_it():
    with pytest.raises(ProtocolViolation, match="asking failed: what a node answered is no answer"):
        with raise_dht_errors("asking"):
            dht_pb2.FindResponse.FromString(b"\xff" * 9)


@pytest.mark.parametrize("error", [ProtocolViolation("bad"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_own_errors_and_interruptions_pass(error):
    with pytest.raises(type(error)) as caught:
        with raise_dht_errors("reading"):
            raise error
    assert caught.value is error
