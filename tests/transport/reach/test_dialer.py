"""The dialer with a daemon that the test plays, on virtual time, and with real ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.errors import DialerBusy, PeerLost
from swarm.transport import daemon_streams
from swarm.transport.daemon import DaemonOptions, start_daemon
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.reach import dialer as module
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID, ask_for_place
from swarm.transport.reach.dialer import DIAL_TIMEOUT_S, IDLE_S, MAX_DAEMONS, Dialer
from swarm.transport.reach.relay_service import RelayService
from tests import virtual_time
from tests.transport.reach.fakes import peer_id

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

HOME, OTHER = peer_id("home"), peer_id("other")
ADDRESS = "/ip4/81.2.69.142/tcp/31337"


class FakeDaemons:
    """The daemons that a dialer starts.

    Attributes:
        started: all of them, in order.
        folders: where each has its sockets.
        dialed: whom they were asked to dial, and where.
        disconnected: whom they were asked to disconnect from.
        answer: what a dial takes, or raises.
        failure: what starting one raises.
    """

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.folders: list[Path] = []
        self.dialed: list[tuple[str, str]] = []
        self.disconnected: list[str] = []
        self.answer: Callable[[], Awaitable[None]] = self.at_once
        self.failure: Exception | None = None

    async def at_once(self) -> None:
        pass

    async def start(self, options: DaemonOptions, folder: Path) -> Any:
        assert not options.host_maddrs, "a dialer does not listen"
        assert not options.initial_peers, "a dialer has no connections"
        await asyncio.sleep(0.1)
        if self.failure is not None:
            raise self.failure
        daemon = SimpleNamespace(_child=SimpleNamespace(returncode=None))
        daemon._client = SimpleNamespace(disconnect=self.disconnect)

        async def shutdown() -> None:
            daemon._child.returncode = 0

        daemon.shutdown = shutdown
        self.started.append(daemon)
        self.folders.append(folder)
        return daemon

    async def connect(self, p2p: Any, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
        assert p2p._child.returncode is None
        self.dialed += [(peer.to_base58(), str(address)) for address in addresses]
        await self.answer()

    async def disconnect(self, peer: PeerID) -> None:
        self.disconnected.append(peer.to_base58())

    @property
    def running(self) -> int:
        return sum(daemon._child.returncode is None for daemon in self.started)


@pytest.fixture
def daemons(monkeypatch) -> FakeDaemons:
    fake = FakeDaemons()
    monkeypatch.setattr(module, "start_daemon", fake.start)
    monkeypatch.setattr(daemon_streams, "connect", fake.connect)
    return fake


def run(scenario: Callable[[Dialer], Awaitable[None]]) -> None:
    """Run a scenario with a dialer; nothing is left of it at the end."""

    async def whole() -> None:
        dialer = Dialer()
        try:
            await scenario(dialer)
        finally:
            await dialer.close()
            dialer._ending = None

    virtual_time.run(whole)


def test_a_peer_is_dialed_at_this_address_and_then_left(daemons):
    async def scenario(dialer):
        await dialer.dial(HOME, ADDRESS)
        assert daemons.dialed == [(HOME, ADDRESS)]
        assert daemons.disconnected == [HOME]

    run(scenario)
    assert daemons.running == 0
    assert not any(folder.exists() for folder in daemons.folders)


def test_dials_at_the_same_time_share_a_daemon(daemons):
    async def scenario(dialer):
        await asyncio.gather(dialer.dial(HOME, ADDRESS), dialer.dial(OTHER, ADDRESS), dialer.dial(HOME, ADDRESS))
        await dialer.dial(OTHER, ADDRESS)
        assert len(daemons.dialed) == 4
        assert daemons.running <= 2

    run(scenario)
    assert daemons.running == 0


def test_who_does_not_answer_is_lost_after_the_given_time(daemons):
    async def scenario(dialer):
        daemons.answer = lambda: asyncio.sleep(1000)
        loop = asyncio.get_running_loop()
        for options, seconds in (((), DIAL_TIMEOUT_S), ((7.0,), 7.0)):
            before = loop.time()
            with pytest.raises(PeerLost, match=f"does not answer at {ADDRESS} within {seconds:g} s"):
                await dialer.dial(HOME, ADDRESS, *options)
            assert seconds <= loop.time() - before <= seconds + 0.2

    run(scenario)


def test_whatever_the_daemon_says_the_peer_is_lost(daemons):
    async def scenario(dialer):
        for error in (
            P2PDaemonError("all dials failed"),
            ConnectionRefusedError(),
            asyncio.IncompleteReadError(b"", 1),
        ):

            async def fail(error: Exception = error) -> None:
                raise error

            daemons.answer = fail
            with pytest.raises(PeerLost, match="cannot be dialed"):
                await dialer.dial(HOME, ADDRESS)

    run(scenario)


def test_what_cannot_be_dialed_is_lost(daemons):
    async def scenario(dialer):
        for target, address in [("no peer id", ADDRESS), (HOME, "no address"), (HOME, "/ip4/81.2.69.142/tcp/70000")]:
            with pytest.raises(PeerLost):
                await dialer.dial(target, address)
        assert daemons.dialed == []

    run(scenario)


def test_a_daemon_that_does_not_start_or_has_died_is_replaced(daemons):
    async def scenario(dialer):
        daemons.failure = P2PDaemonError("no memory")
        with pytest.raises(PeerLost, match="no memory"):
            await dialer.dial(HOME, ADDRESS)
        daemons.failure = None
        await dialer.dial(HOME, ADDRESS)
        daemons.started[-1]._child.returncode = -9  # it has died
        await dialer.dial(HOME, ADDRESS)
        assert daemons.running == 1

    run(scenario)
    assert not any(folder.exists() for folder in daemons.folders)


def test_the_wait_for_a_free_daemon_counts_in_the_time_of_a_dial(daemons):
    """All dial the same peer, so no two of them can share a daemon."""

    async def scenario(dialer):
        loop = asyncio.get_running_loop()
        daemons.answer = lambda: asyncio.sleep(10)
        first = [asyncio.ensure_future(dialer.dial(HOME, ADDRESS, 20.0)) for _ in range(MAX_DAEMONS)]
        await asyncio.sleep(1)
        began, tries = loop.time(), len(daemons.dialed)
        with pytest.raises(DialerBusy, match="was not dialed, because 5 s were spent on others"):
            await dialer.dial(HOME, ADDRESS, 5.0)
        assert loop.time() - began == pytest.approx(5.0)
        assert len(daemons.dialed) == tries
        with pytest.raises(PeerLost, match="does not answer") as lost:
            await dialer.dial(HOME, ADDRESS, 10.0)  # of which some goes by before it can begin
        assert not isinstance(lost.value, DialerBusy)
        assert loop.time() - began < 5.0 + 10.0 + 0.5
        await asyncio.gather(*first)

    run(scenario)


def test_no_daemon_runs_while_nobody_is_dialed(daemons):
    async def scenario(dialer):
        await dialer.dial(HOME, ADDRESS)
        await asyncio.sleep(IDLE_S + 1)
        assert daemons.running == 0
        assert not any(folder.exists() for folder in daemons.folders)
        await dialer.dial(HOME, ADDRESS)
        await asyncio.sleep(IDLE_S - 1)
        await dialer.dial(OTHER, ADDRESS)  # and again it has been used

    run(scenario)
    assert daemons.running == 0


def test_a_daemon_does_not_end_under_a_dial_that_takes_long(daemons):
    async def scenario(dialer):
        daemons.answer = lambda: asyncio.sleep(100)
        slow = asyncio.ensure_future(dialer.dial(HOME, ADDRESS, 200.0))
        await asyncio.sleep(1)
        with contextlib.suppress(PeerLost):
            await dialer.dial(OTHER, ADDRESS)
        await asyncio.sleep(IDLE_S + 1)
        assert not slow.done()
        assert daemons.running == 1
        await slow
        assert daemons.disconnected[-1] == HOME

    run(scenario)


def test_a_dial_that_is_cancelled_leaves_nothing_behind(daemons):
    async def scenario(dialer):
        daemons.answer = lambda: asyncio.sleep(100)
        for seconds in (0.05, 1.0):  # while the daemon starts, and while it dials
            dial = asyncio.ensure_future(dialer.dial(HOME, ADDRESS))
            await asyncio.sleep(seconds)
            dial.cancel()
            await asyncio.gather(dial, return_exceptions=True)
            assert dial.cancelled()
        await asyncio.sleep(IDLE_S + 1)
        assert daemons.running == 0

    run(scenario)


class Daemons(contextlib.AsyncExitStack):
    """Real daemons on loopback, and dialers, all of which are ended."""

    async def start(self, **options: object) -> tuple[P2P, str]:
        """A daemon, and the address at which it listens."""
        folder = ProcessFolder()
        self.callback(folder.remove)
        p2p = await start_daemon(DaemonOptions(host_maddrs=["/ip4/127.0.0.1/tcp/0"], **options), folder.path)
        self.push_async_callback(p2p.shutdown)
        _, (address, *_) = await p2p._client.identify()
        return p2p, str(address)

    def dialer(self) -> Dialer:
        dialer = Dialer()
        self.push_async_callback(dialer.close)
        return dialer


def play(scenario: Callable[[Daemons], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), Daemons() as real:
            await scenario(real)

    uvloop.run(whole())
    gc.collect()  # while this module's filter holds


def closed_port() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"


def test_an_open_port_is_told_from_a_closed_one_and_from_another_peer():
    async def scenario(real):
        home, address = await real.start()
        dialer = real.dialer()
        with pytest.raises(PeerLost, match="refused"):
            await dialer.dial(home.peer_id.to_base58(), closed_port())
        with pytest.raises(PeerLost, match="peer id mismatch"):
            await dialer.dial(OTHER, address)
        await dialer.dial(home.peer_id.to_base58(), address)
        with pytest.raises(PeerLost):  # although a connection is there
            await dialer.dial(home.peer_id.to_base58(), closed_port())
        target = home.peer_id.to_base58()  # and at the same time
        outcomes = await asyncio.gather(
            *(dialer.dial(target, one) for one in (closed_port(), address, closed_port())), return_exceptions=True
        )
        assert [isinstance(outcome, PeerLost) for outcome in outcomes] == [True, False, True]

    play(scenario)


def test_a_port_that_has_just_been_opened_is_reached():
    async def scenario(real):
        home, address = await real.start()
        dialer, target = real.dialer(), home.peer_id.to_base58()
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(PeerLost):
            await dialer.dial(target, f"/ip4/127.0.0.1/tcp/{port}")

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", int(Multiaddr(address)["tcp"]))
            await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

        async with await asyncio.start_server(forward, "127.0.0.1", port):
            await dialer.dial(target, f"/ip4/127.0.0.1/tcp/{port}")

    play(scenario)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def home_behind_relay(real: Daemons) -> tuple[P2P, P2P, str]:
    """A relay, a peer that is connected to it, and the way to that peer if it gets a place."""
    relay, address = await real.start()
    service = RelayService(relay, places=2)
    await relay.add_binary_stream_handler(RELAY_PROTOCOL_ID, service.serve)
    home, _ = await real.start()
    await daemon_streams.connect(home, relay.peer_id, [Multiaddr(address)])
    return relay, home, f"{address}/p2p/{relay.peer_id.to_base58()}/p2p-circuit"


def test_a_way_through_a_relay_leads_nowhere_without_a_place_and_when_the_relay_is_gone():
    async def scenario(real):
        relay, home, way = await home_behind_relay(real)
        with pytest.raises(PeerLost, match="NO_RESERVATION"):
            await real.dialer().dial(home.peer_id.to_base58(), way)
        await ask_for_place(home, relay.peer_id, 10.0)
        dialer = real.dialer()
        await dialer.dial(home.peer_id.to_base58(), way)
        await relay.shutdown()
        with pytest.raises(PeerLost):
            await dialer.dial(home.peer_id.to_base58(), way)

    play(scenario)
