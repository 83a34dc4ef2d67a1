"""How streams to other peers are opened. The daemon is played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.data_structures import Whereabouts
from swarm.errors import PeerLost
from swarm.protocol.messages import DIAL_BACK_PROTOCOL_ID, PROTOCOL_ID
from swarm.transport import daemon_streams
from swarm.transport.peer_streams import PeerStreams
from swarm.transport.reach.address_book import AddressBook
from tests import virtual_time
from tests.transport.reach.fakes import Writer, peer_id

SERVER = peer_id("server")
ADDRESS, LAN = "/ip4/81.2.69.142/tcp/31337", "/ip4/192.168.0.7/tcp/31337"
WAY = f"/ip4/8.8.8.8/tcp/1/p2p/{peer_id('relay')}/p2p-circuit"


class PlayedDaemon:
    """Notes what it is asked for, in order; connections fail if there is a failure, or only those to `fails`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None, fails: list[str] | None = None
    ) -> None:
        self.calls: list[tuple[str, str, object]] = []
        self._failure, self._fails = failure, fails
        monkeypatch.setattr(daemon_streams, "connect", self._connect)
        monkeypatch.setattr(daemon_streams, "open_stream", self._open_stream)

    async def _connect(self, p2p: object, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
        self.calls.append(("connect", peer.to_base58(), list(map(str, addresses))))
        if self._failure is not None and self._fails in (None, list(map(str, addresses))):
            raise self._failure

    async def _open_stream(self, p2p: object, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, Any]:
        self.calls.append(("open", peer.to_base58(), protocol))
        return asyncio.StreamReader(), Writer(lambda data: None)


def streams_with(book: AddressBook) -> PeerStreams:
    daemon: Any = None
    return PeerStreams(daemon, None, book)


def book_with(whereabouts: Whereabouts, outer_host: str = "") -> AddressBook:
    book = AddressBook()
    book.learn(SERVER, whereabouts)
    book.outer_host = outer_host
    return book


def test_a_peer_is_dialed_where_it_says_that_it_is(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch)
        book = book_with(Whereabouts((ADDRESS, WAY), (LAN,), "81.2.69.142"))
        stream = await streams_with(book).open(SERVER)
        assert stream.peer_id == SERVER
        assert daemon.calls == [("connect", SERVER, [ADDRESS, WAY]), ("open", SERVER, PROTOCOL_ID)]
        daemon.calls.clear()
        book.outer_host = "81.2.69.142"
        await streams_with(book).open_dial_back(SERVER)
        assert daemon.calls == [("connect", SERVER, [LAN]), ("open", SERVER, DIAL_BACK_PROTOCOL_ID)]

    asyncio.run(scenario())


def test_a_peer_in_the_same_network_is_dialed_there_alone_until_that_fails(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch, P2PDaemonError("all dials failed"), fails=[LAN])
        book = book_with(Whereabouts((ADDRESS, WAY), (LAN,), "81.2.69.142"), "81.2.69.142")
        streams = streams_with(book)
        streams.outside_known.set()
        await streams.open(SERVER)
        assert [call[2] for call in daemon.calls] == [[LAN], [LAN, ADDRESS, WAY], PROTOCOL_ID]

    asyncio.run(scenario())


def test_a_peer_that_has_just_started_waits_to_learn_who_is_in_its_network(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch)
        book = book_with(Whereabouts((WAY,), (LAN,), "81.2.69.142"))
        streams = streams_with(book)
        opening = asyncio.ensure_future(streams.open(SERVER))
        await asyncio.sleep(0)
        assert daemon.calls == []
        book.outer_host = "81.2.69.142"
        streams.outside_known.set()
        await opening
        assert daemon.calls == [("connect", SERVER, [LAN]), ("open", SERVER, PROTOCOL_ID)]

    asyncio.run(scenario())


def test_where_nobody_tells_from_where_a_peer_is_seen_it_goes_on(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch)
        await streams_with(book_with(Whereabouts((WAY,), (LAN,), "81.2.69.142"))).open(SERVER)
        assert daemon.calls == [("connect", SERVER, [WAY]), ("open", SERVER, PROTOCOL_ID)]

    virtual_time.run(scenario)


def test_a_peer_that_says_nothing_of_it_is_found_by_libp2p(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch)
        await streams_with(AddressBook()).open(SERVER)
        await streams_with(book_with(Whereabouts())).open(SERVER)
        assert daemon.calls == [("open", SERVER, PROTOCOL_ID)] * 2

    asyncio.run(scenario())


def test_a_peer_that_is_nowhere_where_it_says_is_lost(monkeypatch):
    async def scenario():
        for failure in (P2PDaemonError("all dials failed"), OSError("gone"), asyncio.IncompleteReadError(b"", 1)):
            PlayedDaemon(monkeypatch, failure)
            with pytest.raises(PeerLost, match="cannot be reached"):
                await streams_with(book_with(Whereabouts((ADDRESS,)))).open(SERVER)

    asyncio.run(scenario())


def test_an_address_that_libp2p_does_not_read_loses_the_peer_and_nothing_else(monkeypatch):
    async def scenario():
        daemon = PlayedDaemon(monkeypatch)
        with pytest.raises(PeerLost):
            await streams_with(book_with(Whereabouts(("/ip4/81.2.69.142/tcp/700000",)))).open(SERVER)
        assert daemon.calls == []

    asyncio.run(scenario())
