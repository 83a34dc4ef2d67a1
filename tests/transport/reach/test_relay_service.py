"""What a relay grants, refuses and carries: with a daemon that the test plays, and with real ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hivemind.p2p import P2P, PeerID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr

from swarm.errors import ProtocolViolation, RequestRefused
from swarm.transport import daemon_streams
from swarm.transport.daemon import DaemonOptions, start_daemon
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.reach import circuit
from swarm.transport.reach import relay_service as module
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID, HopMessage, Status, StopMessage, ask_for_place, encode
from swarm.transport.reach.relay_service import PLACE_S, PLACES_OF_HOUSEHOLD, RelayService
from tests import virtual_time
from tests.transport.reach.fakes import peer_id

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

RESERVE = HopMessage(type=circuit.RESERVE)


def connect_to(name: str) -> Any:
    return HopMessage(type=circuit.CONNECT, peer={"id": PeerID.from_base58(peer_id(name)).to_bytes()})


def outer(number: int) -> str:
    """The address of a peer, in a network of its own."""
    return f"/ip4/81.{number // 256}.{number % 256}.9/tcp/4001"


class Pipe:
    """The writing end of a stream, which feeds the other side's reader."""

    def __init__(self, own_reader: asyncio.StreamReader, reader: asyncio.StreamReader) -> None:
        self.aborted = self.closed = self.is_stalled = False
        self._own_reader = own_reader
        self._reader = reader

    @property
    def transport(self) -> Pipe:
        return self

    def write(self, data: bytes) -> None:
        if not self.closed:
            self._reader.feed_data(data)

    def get_write_buffer_size(self) -> int:
        return int(self.is_stalled)

    async def drain(self) -> None:
        if self.is_stalled:
            await asyncio.Event().wait()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._own_reader.feed_eof()
            self._reader.feed_eof()

    def abort(self) -> None:
        self.aborted = True
        self.close()


class Ends:
    """Both directions of a stream, as the one who opened it has them."""

    def __init__(self) -> None:
        self.reader, self.their_reader = asyncio.StreamReader(), asyncio.StreamReader()
        self.writer, self.their_writer = Pipe(self.reader, self.their_reader), Pipe(self.their_reader, self.reader)

    async def answer(self, kind: Any = HopMessage) -> Any:
        return await circuit.receive(self.reader, kind)


class PlayedRelay:
    """A relay whose daemon is played.

    Attributes:
        connected: names of the peers that it is connected to, and where.
        offered: the streams that were opened to them, in order.
        takes: what a peer answers that is offered a connection.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: int = 64, **options: Any) -> None:
        self.connected: dict[str, str] = {}
        self.offered: list[Ends] = []
        self.takes = StopMessage(type=circuit.STOP_STATUS, status=Status.OK)
        monkeypatch.setattr(daemon_streams, "open_stream", self._open_stream)
        p2p: Any = SimpleNamespace(list_peers=self._list_peers)
        self.service = RelayService(p2p, places, **options)
        self._tasks: set[asyncio.Task[None]] = set()

    async def _list_peers(self) -> list[Any]:
        return [
            SimpleNamespace(peer_id=PeerID.from_base58(peer_id(name)), addrs=[address])
            for name, address in self.connected.items()
        ]

    async def _open_stream(self, p2p: Any, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, Any]:
        ends = Ends()
        self.offered.append(ends)
        ends.their_writer.write(encode(self.takes))
        return ends.reader, ends.writer

    def open(self, name: str, address: str) -> tuple[Ends, asyncio.Task[None]]:
        """A stream that a peer opens at this relay."""
        ends = Ends()
        info: Any = SimpleNamespace(peer_id=PeerID.from_base58(peer_id(name)), addr=Multiaddr(address))
        task = asyncio.ensure_future(self._serve(info, ends))
        self._tasks.add(task)
        return ends, task

    async def _serve(self, info: Any, ends: Ends) -> None:
        writer: Any = ends.their_writer
        try:
            await self.service.serve(info, ends.their_reader, writer)
        finally:
            writer.close()

    async def ask(self, name: str, address: str, request: Any) -> tuple[Ends, int]:
        """Send a request; its stream, and the answer's status."""
        ends, _ = self.open(name, address)
        ends.writer.write(encode(request))
        return ends, int((await ends.answer()).status)

    async def has_place(self, name: str, address: str) -> bool:
        """Connect a peer, and ask for a place."""
        self.connected[name] = address
        return (await self.ask(name, address, RESERVE))[1] == Status.OK


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(scenario, limit=10 * 86400.0)


def test_places_are_bounded_and_free_again_when_their_holders_are_gone(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch, places=2)
        assert await relay.has_place("one", outer(1))
        assert await relay.has_place("two", outer(2))
        assert await relay.has_place("two", outer(2))  # renewed
        assert not await relay.has_place("three", outer(3))
        del relay.connected["one"]
        assert await relay.has_place("three", outer(3))
        await asyncio.sleep(PLACE_S + 1)
        assert await relay.has_place("four", outer(4))  # all others have expired
        assert not await PlayedRelay(monkeypatch, places=0).has_place("one", outer(1))

    play(scenario)


def test_one_household_gets_few_of_many_places(monkeypatch):
    async def scenario():
        for household in (["/ip4/81.2.3.4/tcp/1"], ["/ip6/2a01:4f8:7:1::1/tcp/1", "/ip6/2a01:4f8:7:2::1/tcp/1"]):
            relay = PlayedRelay(monkeypatch)
            granted = [await relay.has_place(f"peer{n}", household[n % len(household)]) for n in range(12)]
            assert granted == [True] * PLACES_OF_HOUSEHOLD + [False] * (12 - PLACES_OF_HOUSEHOLD)
            assert await relay.has_place("neighbor", "/ip4/81.2.3.5/tcp/1")

    play(scenario)


def test_members_only(monkeypatch):
    async def scenario():
        members = {peer_id("anna")}
        relay = PlayedRelay(monkeypatch, may_hold=members.__contains__)
        assert (await relay.ask("eve", outer(1), RESERVE))[1] == Status.PERMISSION_DENIED
        assert await relay.has_place("anna", outer(2))
        assert (await relay.ask("eve", outer(1), connect_to("anna")))[1] == Status.OK  # anna asks for the proof
        members.clear()  # revoked
        assert (await relay.ask("eve", outer(1), connect_to("anna")))[1] == Status.NO_RESERVATION

    play(scenario)


def test_what_is_refused(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch)
        await relay.has_place("home", outer(1))

        async def status(request: Any) -> int:
            return (await relay.ask("client", outer(2), request))[1]

        assert await status(connect_to("stranger")) == Status.NO_RESERVATION
        for nobody in (HopMessage(type=circuit.CONNECT), HopMessage(type=circuit.CONNECT, peer={"id": b"\xff" * 99})):
            assert await status(nobody) == Status.NO_RESERVATION
        assert await status(HopMessage(type=circuit.STATUS, status=100)) == Status.UNEXPECTED_MESSAGE
        assert await status(HopMessage()) == Status.UNEXPECTED_MESSAGE
        relay.takes = StopMessage(type=circuit.STOP_STATUS, status=Status.PERMISSION_DENIED)
        assert await status(connect_to("home")) == Status.CONNECTION_FAILED
        assert relay.offered[-1].writer.aborted
        relay.connected["home"] = f"{outer(3)}/p2p/{peer_id('relay')}/p2p-circuit"  # by another relay: no chains
        assert await status(connect_to("home")) == Status.NO_RESERVATION
        del relay.connected["home"]
        assert await status(connect_to("home")) == Status.NO_RESERVATION
        behind = f"{outer(3)}/p2p/{peer_id('relay')}/p2p-circuit"
        for request in (RESERVE, connect_to("home")):
            ends, task = relay.open("client", behind)
            ends.writer.write(encode(request))
            with pytest.raises(RequestRefused):
                await task

    play(scenario)


def test_requests_that_do_not_come_or_mean_nothing(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch)
        _, silent = relay.open("eve", outer(1))
        with pytest.raises(TimeoutError):
            await silent
        ends, garbage = relay.open("eve", outer(1))
        ends.writer.write(b"\x14" + b"\xff" * 20)
        with pytest.raises(ProtocolViolation):
            await garbage

    play(scenario)


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_one_request_raises_nothing_else(monkeypatch, data):
    async def scenario():
        relay = PlayedRelay(monkeypatch)
        await relay.has_place("home", outer(1))
        sent = bytearray(encode(data.draw(st.sampled_from([RESERVE, connect_to("home")]))))
        for _ in range(data.draw(st.integers(1, 3))):
            sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
        ends, task = relay.open("eve", outer(2))
        ends.writer.write(bytes(sent))
        ends.their_reader.feed_eof()
        with contextlib.suppress(ProtocolViolation, asyncio.IncompleteReadError):
            await task
        assert not relay.service._streams

    play(scenario)


async def carried(relay: PlayedRelay, asker: str, address: str) -> tuple[Ends, Ends]:
    """A connection to the peer "home"; both its ends, as the relay has them."""
    ends, status = await relay.ask(asker, address, connect_to("home"))
    assert status == Status.OK
    inner = relay.offered[-1]
    offer = await circuit.receive(inner.their_reader, StopMessage)
    assert PeerID(offer.peer.id).to_base58() == peer_id(asker)
    assert offer.limit == StopMessage(limit={"duration": module.CIRCUIT_S, "data": relay.service._circuit_bytes}).limit
    return ends, inner


def test_what_is_carried_and_when_it_ends(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch, circuit_bytes=1000)
        await relay.has_place("home", outer(1))
        client, home = await carried(relay, "client", outer(2))
        client.writer.write(b"question")
        assert await home.their_reader.readexactly(8) == b"question"
        home.their_writer.write(b"answer")
        assert await client.reader.readexactly(6) == b"answer"
        client.writer.write(b"x" * 2000)
        assert len(await home.their_reader.read()) == 992, "it has carried more than its limit"
        client, home = await carried(relay, "client", outer(2))
        home.their_writer.close()
        assert await client.reader.read() == b""
        client, home = await carried(relay, "client", outer(2))
        await asyncio.sleep(module.CIRCUIT_S + 1)
        assert client.their_writer.closed
        assert home.writer.closed
        await relay.has_place("home", outer(1))
        client, home = await carried(relay, "client", outer(2))
        home.writer.is_stalled = True
        client.writer.write(b"nobody reads this")
        await asyncio.sleep(daemon_streams.STALL_TIMEOUT_S + 1)
        assert home.writer.aborted
        await asyncio.sleep(1)
        assert not relay.service._streams

    play(scenario)


def test_all_connections_share_a_rate(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch)
        await relay.has_place("home", outer(1))
        loop = asyncio.get_running_loop()
        pairs = [await carried(relay, f"client{n}", outer(n)) for n in (2, 3)]
        size = int(2 * module.BYTES_PER_S)
        began = loop.time()

        async def send(client: Ends, home: Ends) -> float:
            client.writer.write(bytes(size))
            await home.their_reader.readexactly(size)
            return loop.time() - began

        took = await asyncio.gather(*(send(*pair) for pair in pairs))
        assert all(3.5 <= seconds <= 4.1 for seconds in took), took

    play(scenario)


def test_a_network_that_floods_a_relay_does_not_shut_others_out(monkeypatch):
    async def scenario():
        monkeypatch.setattr(module, "BURST_OF_NETWORK", 1e9)
        relay = PlayedRelay(monkeypatch)
        await relay.has_place("home", outer(1))
        client, home = await carried(relay, "client", outer(2))
        flood = [relay.open(f"eve{n}", "/ip4/66.6.6.6/tcp/1")[0] for n in range(2 * module.MAX_STREAMS)]
        await asyncio.sleep(0)
        assert (await flood[-1].answer()).status == Status.LIMIT_EXCEEDED
        assert len(relay.service._streams) == module.MAX_STREAMS
        other, _ = await carried(relay, "other", outer(3))
        assert len(relay.service._streams) == module.MAX_STREAMS
        client.writer.write(b"still there")
        assert await home.their_reader.readexactly(11) == b"still there"
        await asyncio.sleep(module.REQUEST_TIMEOUT_S + 1)
        assert len(relay.service._streams) == 2
        other.writer.close()

    play(scenario)


def test_a_network_is_charged_for_its_requests(monkeypatch):
    async def scenario():
        relay = PlayedRelay(monkeypatch)
        granted = [await relay.has_place("eve", outer(1)) for _ in range(int(module.BURST_OF_NETWORK) + 1)]
        assert granted == [True] * int(module.BURST_OF_NETWORK) + [False]
        assert await relay.has_place("home", outer(2))
        await asyncio.sleep(1)
        assert await relay.has_place("eve", outer(1))

    play(scenario)


async def started(stack: contextlib.AsyncExitStack, *announced: str) -> tuple[P2P, str]:
    """A real daemon, and its address; others are told that it is at `announced`. It finds no other ways to peers."""
    folder = ProcessFolder()
    stack.callback(folder.remove)
    options = DaemonOptions(host_maddrs=["/ip4/127.0.0.1/tcp/0"], announce_maddrs=announced, asks_others=False)
    p2p = await start_daemon(options, folder.path)
    stack.push_async_callback(p2p.shutdown)
    _, (address, *_) = await p2p._client.identify()
    return p2p, str(address)


@contextlib.asynccontextmanager
async def home_at_relay(**options: int) -> AsyncIterator[tuple[P2P, P2P, str]]:
    """A peer with a place at a relay, another peer, and the way from this one to the first."""
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        relay, address = await started(stack)
        await relay.add_binary_stream_handler(RELAY_PROTOCOL_ID, RelayService(relay, 1, **options).serve)
        (home, _), (client, _) = await started(stack, "/ip4/127.0.0.1/tcp/1"), await started(stack)
        await daemon_streams.connect(home, relay.peer_id, [Multiaddr(address)])
        assert PLACE_S - 60 < await ask_for_place(home, relay.peer_id, 10.0) <= PLACE_S
        yield home, client, f"{address}/p2p/{relay.peer_id.to_base58()}/p2p-circuit"


def test_daemons_talk_through_a_relay_until_its_limit(monkeypatch):
    """An echo of 100 kB comes back; of a megabyte, the connection ends."""

    async def echo(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await daemon_streams.carry(reader, writer)

    async def scenario() -> None:
        async with home_at_relay(circuit_bytes=500_000) as (home, client, way):
            await home.add_binary_stream_handler("echo", echo)
            await daemon_streams.connect(client, home.peer_id, [Multiaddr(way)])
            assert all("p2p-circuit" in str(one) for one in await daemon_streams.addresses_of(client, home.peer_id))
            reader, writer = await daemon_streams.open_stream(client, home.peer_id, "echo")
            writer.write(b"x" * 100_000)
            assert await reader.readexactly(100_000) == b"x" * 100_000
            writer.write(b"x" * 1_000_000)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1_000_000)
            writer.close()
            while await daemon_streams.addresses_of(client, home.peer_id):
                await asyncio.sleep(0.05)

    uvloop.run(scenario())
    gc.collect()  # while this module's filter holds
