"""A heartbeat on a connection that is played in memory, on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, PeerID

from swarm.errors import PeerLost
from swarm.transport import daemon_streams
from swarm.transport.reach.relay_places import PING_BYTES, PING_PROTOCOL_ID, Heartbeat
from tests import virtual_time
from tests.transport.reach.fakes import Writer, peer_id

RELAY = PeerID.from_base58(peer_id("relay"))


def run(scenario: Any, monkeypatch: pytest.MonkeyPatch, echo: Any = bytes) -> None:
    async def whole() -> None:
        reader = asyncio.StreamReader()

        def answer(data: bytes) -> None:
            assert len(data) == PING_BYTES
            if echo is not None:
                reader.feed_data(echo(data))

        async def open_stream(p2p: Any, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, Any]:
            assert (peer, protocol) == (RELAY, PING_PROTOCOL_ID)
            return reader, Writer(answer)

        monkeypatch.setattr(daemon_streams, "open_stream", open_stream)
        p2p: Any = None
        await scenario(await Heartbeat.open(p2p, RELAY, 1.0), reader)

    virtual_time.run(whole)


def test_it_goes_on_as_long_as_the_peer_echoes(monkeypatch):
    async def scenario(heartbeat, reader):
        for _ in range(3):
            await heartbeat.beat(1.0)
        assert not heartbeat.has_ended

    run(scenario, monkeypatch)


def test_the_end_of_the_connection_is_seen_without_asking(monkeypatch):
    async def scenario(heartbeat, reader):
        reader.feed_eof()
        assert heartbeat.has_ended
        with pytest.raises(PeerLost, match="the connection has ended"):
            await heartbeat.beat(1.0)

    run(scenario, monkeypatch, None)


def test_a_connection_that_breaks_is_seen_without_asking(monkeypatch):
    async def scenario(heartbeat, reader):
        reader.set_exception(ConnectionResetError())
        assert heartbeat.has_ended
        with pytest.raises(PeerLost, match="the connection has ended"):
            await heartbeat.beat(1.0)

    run(scenario, monkeypatch, None)


def test_silence_is_the_end_after_a_while(monkeypatch):
    async def scenario(heartbeat, reader):
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(PeerLost, match="has not answered for 3 s"):
            await heartbeat.beat(3.0)
        assert 3.0 <= loop.time() - began < 3.2

    run(scenario, monkeypatch, None)


def test_other_bytes_are_no_echo(monkeypatch):
    async def scenario(heartbeat, reader):
        with pytest.raises(PeerLost, match="other bytes"):
            await heartbeat.beat(1.0)

    run(scenario, monkeypatch, lambda data: bytes(PING_BYTES))


@pytest.mark.parametrize(
    "failure", [P2PDaemonError("no addresses"), ConnectionRefusedError(), TimeoutError()], ids=repr
)
def test_a_peer_that_is_not_there_cannot_be_pinged(monkeypatch, failure):
    async def open_stream(*_: Any) -> Any:
        raise failure

    async def whole() -> None:
        p2p: Any = None
        with pytest.raises(PeerLost, match="cannot be pinged"):
            await Heartbeat.open(p2p, RELAY, 1.0)

    monkeypatch.setattr(daemon_streams, "open_stream", open_stream)
    virtual_time.run(whole)
