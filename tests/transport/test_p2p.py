"""Real libp2p daemons on loopback."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import get_type_hints

import psutil
import pytest
import uvloop

from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AddressUnavailable, CacheFull, IdentityError, InvalidOption, PeerLost, PeerUnreachable
from swarm.protocol import messages
from swarm.server.sessions.reply_stream import ReplyStream
from swarm.transport.dht.protocol import DhtProtocol
from swarm.transport.p2p import RELAYED_PEERS, P2PConfig, Peer

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SIX_MEGABYTES = secrets.token_bytes(6 << 20)
STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
QUICKLY = 30.0
PATIENCE = 60.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go, beside `tmp_path`; short, because sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="swp-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    others.clear()
    others.update(daemons())
    yield path
    gc.collect()  # while this module's filter holds
    shutil.rmtree(path, ignore_errors=True)


others: set[psutil.Process] = set()
"""Daemons that ran before the test: a fixture of another module may live on in this process."""


def daemons() -> list[psutil.Process]:
    """Daemons that the test has started and that still run."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child not in others and child.status() != psutil.STATUS_ZOMBIE and "p2pd" in child.name()
    ]


def nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + QUICKLY
    while daemons() and time.monotonic() < deadline:  # one that was told to end may not have ended yet
        time.sleep(0.01)
    assert daemons() == []
    assert list(folder.iterdir()) == []


async def listening(*initial_peers: str, **options: object) -> Peer:
    config = P2PConfig(initial_peers=initial_peers, host_maddrs=LOOPBACK, **options)
    return await Peer.create(config, AnnouncementValidator())


async def address_of(peer: Peer) -> str:
    (address,) = await peer.visible_addresses()
    return address


async def echo(stream) -> None:
    """Answers every frame with the caller's id and the same payload, until the caller has gone."""
    while True:
        frame = await stream.receive()
        await stream.send(messages.Refusal("echo", stream.peer_id), frame.payload)


async def exchange(stream, payload: bytes) -> str:
    await stream.send(messages.InfoRequest(), payload)
    frame = await stream.receive()
    assert frame.payload == payload
    return messages.decode_server(frame.header).message


def run(scenario):
    """Its result; a scenario that hangs is cancelled, so that its own clean-up ends the daemons."""

    async def limited():
        return await asyncio.wait_for(scenario, PATIENCE)

    return uvloop.run(limited())


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_machine_with_a_wrong_clock_is_told_so(folder, monkeypatch):
    answered = DhtProtocol.rpc_ping

    async def at_another_time(self, request, context):
        response = await answered(self, request, context)
        response.dht_time += 60
        return response

    async def scenario():
        server = await listening()
        try:
            address = await address_of(server)
            with pytest.raises(PeerUnreachable, match=r"local time must be within 3 .* Check this machine's clock"):
                await Peer.create(P2PConfig(initial_peers=(address,)), AnnouncementValidator())
        finally:
            await server.shutdown()

    at_another_time.__annotations__ = get_type_hints(answered)  # by which the message's type is known
    monkeypatch.setattr(DhtProtocol, "rpc_ping", at_another_time)
    run(scenario())
    nothing_is_left(folder)


def test_two_peers_exchange_frames_and_leave_nothing_behind(folder):
    async def scenario():
        server = await listening()
        try:
            address = await address_of(server)
            assert address.startswith("/ip4/127.0.0.1/tcp/")
            assert address.endswith("/p2p/" + server.peer_id)
            await server.serve(echo)
            client = await Peer.create(P2PConfig(initial_peers=(address,)), AnnouncementValidator())
            try:
                assert len(daemons()) == 2
                # Ctrl-C at a terminal ends the peer, which ends its daemon.
                assert os.getpgid(0) not in {os.getpgid(daemon.pid) for daemon in daemons()}
                assert list(folder.iterdir())
                with closing(await client.open_stream(server.peer_id)) as stream:
                    # The names come from libp2p's handshake, not from what the peers say about themselves.
                    assert (stream.peer_id, await exchange(stream, b"")) == (server.peer_id, client.peer_id)
                    for payload in (b"x", SIX_MEGABYTES, b""):
                        await exchange(stream, payload)
                    with closing(await client.open_stream(server.peer_id)) as second:
                        await asyncio.gather(*(exchange(one, SIX_MEGABYTES) for one in (stream, second)))
                    assert await exchange(stream, b"still open") == client.peer_id
            finally:
                await client.shutdown()
        finally:
            await server.shutdown()

    run(scenario())
    nothing_is_left(folder)


def test_a_refusal_reaches_who_sends_at_the_same_time(folder):
    """Closed at once, one stream in six was reset before its reader had the refusal."""

    async def refuse(stream) -> None:
        stream = ReplyStream(stream)
        await stream.send(messages.refusal(CacheFull("a peer may open 0 streams")))
        await stream.discard_incoming()

    async def ask(peer: Peer, other: str) -> str:
        stream = await peer.open_stream(other)
        try:
            await stream.send(messages.InfoRequest())
            return messages.decode_server((await stream.receive()).header).code
        finally:
            stream.close()

    async def scenario():
        server = await listening()
        client = await listening(await address_of(server))
        await server.serve(refuse)
        for _ in range(4):
            said = await asyncio.gather(*(ask(client, server.peer_id) for _ in range(40)))
            assert set(said) == {CacheFull.code}
        await client.shutdown()
        await server.shutdown()

    run(scenario())
    nothing_is_left(folder)


def test_a_peer_that_dies_is_lost_quickly(folder):
    async def scenario():
        client = await listening()
        try:
            address = await address_of(client)
            before = daemons()
            server = await listening(address)
            try:
                await server.serve(echo)
                stream = await client.open_stream(server.peer_id)
                await exchange(stream, b"alive")
                (daemon,) = [child for child in daemons() if child not in before]
                waiting = asyncio.create_task(stream.receive())
                daemon.kill()
                began = time.monotonic()
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(waiting, QUICKLY)
                with pytest.raises(PeerLost, match=server.peer_id[-6:]):
                    await client.open_stream(server.peer_id)
                assert time.monotonic() - began < QUICKLY
            finally:
                # Its own peer notices that its daemon is gone, and can leave all the same.
                await asyncio.wait_for(server.shutdown(), QUICKLY)
            with pytest.raises(PeerLost, match=STRANGER[-6:]):
                await asyncio.wait_for(client.open_stream(STRANGER), QUICKLY)
        finally:
            await client.shutdown()

    run(scenario())
    nothing_is_left(folder)


def test_leaving_ends_the_streams_and_their_handlers_without_a_word(folder, caplog):
    async def scenario():
        client = await listening()
        try:
            server = await listening(await address_of(client))
            began, ended = asyncio.Event(), asyncio.Event()

            async def forever(stream):
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            try:
                await server.serve(forever)
                stream = await client.open_stream(server.peer_id)
                await stream.send(messages.InfoRequest())
                await asyncio.wait_for(began.wait(), QUICKLY)
            finally:
                await server.shutdown()
            assert ended.is_set()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(stream.receive(), QUICKLY)
        finally:
            await client.shutdown()

    run(scenario())
    nothing_is_left(folder)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_no_initial_peer_answers(folder):
    nobody = f"/ip4/127.0.0.1/tcp/{unused_port()}/p2p/{STRANGER}"
    config = P2PConfig(initial_peers=(nobody,), host_maddrs=LOOPBACK)
    with pytest.raises(PeerUnreachable, match=STRANGER):
        run(Peer.create(config, AnnouncementValidator()))
    nothing_is_left(folder)


def test_what_is_wrong_before_anything_starts(folder, tmp_path):
    (tmp_path / "identity").write_bytes(b"garbage")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        for config, error in (
            (P2PConfig(initial_peers=("nonsense",)), InvalidOption),
            (P2PConfig(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)), AddressUnavailable),
            (P2PConfig(host_maddrs=LOOPBACK, identity_path=tmp_path / "identity"), IdentityError),
        ):
            with pytest.raises(error):
                run(Peer.create(config, AnnouncementValidator()))
    nothing_is_left(folder)


def test_a_start_that_is_cancelled(folder):
    async def scenario():
        starting = asyncio.create_task(listening())
        deadline = time.monotonic() + QUICKLY
        while not daemons():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(scenario())
    nothing_is_left(folder)


def test_a_daemon_that_does_not_start_is_not_an_unexplained_error(folder, monkeypatch):
    monkeypatch.setattr("hivemind.p2p.p2p_daemon.P2PD_FILENAME", "no-such-file")
    with pytest.raises(PeerLost, match="did not start"):
        run(listening())
    nothing_is_left(folder)


EVERYWHERE = ("/ip4/0.0.0.0/tcp/31337",)


def test_for_how_many_a_peer_relays():
    for relay, expected in [(True, RELAYED_PEERS), (False, 0), (0, 0), (1, 1), (500, 500)]:
        config = P2PConfig(host_maddrs=EVERYWHERE, relay=relay)
        assert config.relayed_peers == expected
        assert type(config.relayed_peers) is int
        assert P2PConfig(initial_peers=("/ip4/9.9.9.9/tcp/1",), relay=relay).relayed_peers == 0  # a client
