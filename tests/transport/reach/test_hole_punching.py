"""Connections that are punched through routers: the peer that wants one, the relay, and the peer that is sought.

The daemons are played and times are virtual, but for the last test, which is about real sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from multiaddr import Multiaddr

from swarm.errors import PeerLost, RequestRefused
from swarm.protocol import messages
from swarm.transport import daemon_streams
from swarm.transport.reach import hole_punching
from swarm.transport.reach.heartbeat import BEAT_PERIOD_S, BEAT_TIMEOUT_S
from swarm.transport.reach.hole_punching import (
    ASK_TIMEOUT_S,
    BURST,
    BURST_OF_NETWORK,
    HEAD_START_S,
    MAX_PUNCHED,
    REFILL_PER_S,
    RETRY_S,
    HolePuncher,
)
from tests import virtual_time
from tests.memory_hub import stream_pair
from tests.transport.reach.fakes import peer_id

OWN, HOME = sorted(peer_id(name) for name in ("own", "home"))
RELAY, ASKER = peer_id("relay"), peer_id("asker")
AT_RELAY, AT_HOME, AT_ASKER = "/ip4/8.8.8.8/tcp/4001", "/ip4/81.2.69.142/tcp/31337", "/ip4/45.0.0.9/tcp/50123"
WAY = f"{AT_RELAY}/p2p/{RELAY}/p2p-circuit"
OUTER = "81.2.69.142"


class Daemon:
    """A peer's daemon, and the relay that it asks.

    Attributes:
        connected: by peer id, where the connections lead.
        dialed: whom it was told to connect to, and where.
        disconnected: whom it was told to disconnect from.
        opens: whether the sought peer can be dialed directly once the relay has told it.
        reply: what the relay answers; None if nothing.
        sent: what was sent to whom, decoded.
        lost: whom it cannot reach.
        beats: whether those who are pinged answer; None if the connection has ended.
        relays: ids of the relays that it has chosen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_hidden: bool) -> None:
        self.peer_id = PeerID.from_base58(OWN)
        self.connected: dict[str, list[str]] = {}
        self.dialed: list[tuple[str, list[str]]] = []
        self.disconnected: list[str] = []
        self.opens = True
        self.reply: Any = messages.PunchReply(AT_HOME)
        self.sent: list[tuple[str, Any]] = []
        self.lost: set[str] = set()
        self.beats: bool | None = True
        self.relays = {RELAY}
        self._client = SimpleNamespace(disconnect=self._disconnect)
        self._tasks: set[asyncio.Task[None]] = set()
        monkeypatch.setattr(daemon_streams, "connect", self._connect)
        monkeypatch.setattr(hole_punching, "Heartbeat", SimpleNamespace(open=self._open_heartbeat))
        me: Any = self
        self.puncher = HolePuncher(me, self._open, lambda: self.relays, lambda: is_hidden)

    async def list_peers(self) -> list[Any]:
        return [
            SimpleNamespace(peer_id=PeerID.from_base58(one), addrs=list(map(Multiaddr, there)))
            for one, there in self.connected.items()
        ]

    async def _connect(self, p2p: object, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
        name, there = peer.to_base58(), list(map(str, addresses))
        self.dialed.append((name, there))
        direct = AT_HOME in there and self.opens
        self.connected[name] = [AT_HOME if direct else f"{WAY}/p2p/{HOME}" if name == HOME else there[0]]

    async def _disconnect(self, peer: PeerID) -> None:
        self.disconnected.append(peer.to_base58())
        self.connected.pop(peer.to_base58(), None)

    async def _open(self, target: str) -> Any:
        if target in self.lost:
            raise PeerLost("it is gone")
        ours, theirs = stream_pair(OWN, target)
        task = asyncio.ensure_future(self._answer(target, theirs))
        self._tasks.add(task)
        return ours

    async def _answer(self, target: str, stream: Any) -> None:
        request = messages.decode_reachability((await stream.receive(0)).header)
        self.sent.append((target, request))
        if self.reply is not None and isinstance(request, messages.PunchRequest):
            await stream.send(self.reply)

    async def _open_heartbeat(self, p2p: object, peer: PeerID, timeout_s: float) -> Any:
        async def beat(timeout_s: float) -> None:
            if self.beats is not True:
                raise PeerLost("it has not answered")

        daemon = self

        class PlayedHeartbeat(SimpleNamespace):
            @property
            def has_ended(self) -> bool:
                return daemon.beats is None

        return PlayedHeartbeat(beat=beat, close=lambda: None)

    async def connect(self) -> list[str]:
        """Connect to the peer at home; where it was dialed."""
        await self.puncher.connect(HOME, [WAY], OUTER)
        return next((there for name, there in reversed(self.dialed) if name == HOME), [])

    @property
    def asked(self) -> int:
        return sum(isinstance(request, messages.PunchRequest) for _, request in self.sent)


def run(monkeypatch: pytest.MonkeyPatch, scenario: Any, is_hidden: bool = True) -> None:
    async def whole() -> None:
        daemon = Daemon(monkeypatch, is_hidden)
        await scenario(daemon)
        await daemon.puncher.close()

    virtual_time.run(whole, limit=86400.0)


def test_a_peer_behind_a_router_is_dialed_where_the_relay_sees_it_and_through_the_relay_if_that_fails(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        assert await daemon.connect() == [AT_HOME, WAY]
        assert daemon.dialed[0] == (RELAY, [AT_RELAY])
        assert daemon.sent == [(RELAY, messages.PunchRequest(HOME, reverse=False))]
        await daemon.connect()
        assert daemon.asked == 1, "it is connected already"

    run(monkeypatch, scenario)


def test_those_who_want_the_same_peer_wait_for_the_first(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        await asyncio.gather(*(daemon.connect() for _ in range(5)))
        assert daemon.asked == 1
        assert daemon.dialed == [(RELAY, [AT_RELAY]), (HOME, [AT_HOME, WAY])]

    run(monkeypatch, scenario)


def test_where_no_hole_can_be_punched_the_relay_is_used_at_once_for_a_while(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        daemon.opens = False
        for tries, pause in ((1, RETRY_S - 1), (1, 1.0), (2, 0.0)):
            await daemon.connect()
            assert daemon.asked == tries
            daemon.connected.pop(HOME)
            await asyncio.sleep(pause)
        daemon.opens = True
        await asyncio.sleep(RETRY_S)
        for tries in (3, 4):
            assert await daemon.connect() == [AT_HOME, WAY]
            assert daemon.asked == tries
            daemon.connected.pop(HOME)

    run(monkeypatch, scenario)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        messages.refusal(RequestRefused("no")),
        messages.PunchReply("/ip4/45.0.0.77/tcp/31337"),  # where the peer itself does not say that it is
        messages.PunchReply(f"/ip4/{OUTER}/tcp/80"),
        messages.PunchReply(f"/ip4/{OUTER}/udp/31337"),
        messages.PunchReply(f"{WAY}/p2p/{HOME}"),
        messages.LookAgain(),
    ],
)
def test_a_relay_that_does_not_help_costs_little(monkeypatch, reply):
    async def scenario(daemon: Daemon) -> None:
        daemon.reply = reply
        began = asyncio.get_running_loop().time()
        assert await daemon.connect() == [WAY]
        assert asyncio.get_running_loop().time() <= began + ASK_TIMEOUT_S + HEAD_START_S
        daemon.lost.add(RELAY)
        daemon.connected.clear()
        assert await daemon.connect() == [WAY]

    run(monkeypatch, scenario)


def test_a_peer_that_is_a_relay_of_the_other_one_asks_nobody(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        way = f"{AT_RELAY}/p2p/{OWN}/p2p-circuit"
        await daemon.puncher.connect(HOME, [way], OUTER)
        assert daemon.dialed == [(HOME, [way])]

    run(monkeypatch, scenario)


@pytest.mark.parametrize(("beats", "closes"), [(True, False), (False, True), (None, False)])
def test_a_connection_is_closed_if_nothing_comes_over_it_any_more(monkeypatch, beats, closes):
    async def scenario(daemon: Daemon) -> None:
        await daemon.connect()
        await asyncio.sleep(10 * BEAT_PERIOD_S)
        assert not daemon.disconnected
        daemon.beats = beats
        await asyncio.sleep(BEAT_PERIOD_S + BEAT_TIMEOUT_S)
        assert daemon.disconnected == [HOME] * closes

    run(monkeypatch, scenario)


@pytest.mark.parametrize("comes", [True, False])
def test_the_peer_behind_a_router_dials_and_the_other_one_waits_for_it(monkeypatch, comes):
    async def scenario(daemon: Daemon) -> None:
        met = note_dials(monkeypatch, opens=comes)
        connecting = asyncio.ensure_future(daemon.connect())
        await asyncio.sleep(0.1)
        assert daemon.sent == [(RELAY, messages.PunchRequest(HOME, reverse=True))]
        assert met == [AT_HOME]
        assert not connecting.done()
        if comes:
            daemon.connected[HOME] = [AT_HOME]
        assert await connecting == [WAY]  # which does nothing if there is a connection

    run(monkeypatch, scenario, is_hidden=False)


def test_of_two_peers_behind_routers_the_same_one_dials_whoever_seeks_the_other(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        for other in map(peer_id, "abcdefgh"):
            await daemon.puncher.connect(other, [WAY], OUTER)
            assert daemon.sent.pop() == (RELAY, messages.PunchRequest(other, reverse=other < OWN))

    note_dials(monkeypatch)
    run(monkeypatch, scenario)


# The relay.


async def request(daemon: Daemon, address: str = AT_ASKER, reverse: bool = False) -> Any:
    """Ask the peer, as one that comes from there, to be connected to the peer at home; what it answers."""
    ours, theirs = stream_pair(ASKER, OWN)
    await daemon.puncher.answer(messages.PunchRequest(HOME, reverse), theirs, address)
    return messages.decode_reachability((await ours.receive(0)).header)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_relay_tells_each_where_it_sees_the_other(monkeypatch, reverse):
    async def scenario(daemon: Daemon) -> None:
        daemon.connected[HOME] = [f"{WAY}/p2p/{HOME}", AT_HOME]
        assert await request(daemon, reverse=reverse) == messages.PunchReply(AT_HOME)
        await asyncio.sleep(0.1)
        assert daemon.sent == [(HOME, messages.Punch(ASKER, AT_ASKER, reverse))]

    run(monkeypatch, scenario)


@pytest.mark.parametrize(
    "address", [f"{WAY}/p2p/{ASKER}", "/ip4/192.168.1.7/tcp/50123", "/ip4/45.0.0.9/tcp/22", "/ip6/2a00:45::9/tcp/50123"]
)
def test_a_relay_has_nobody_dial_what_is_not_a_public_address(monkeypatch, address):
    async def scenario(daemon: Daemon) -> None:
        daemon.connected[HOME] = [AT_HOME]
        assert (await request(daemon, address)).code == RequestRefused.code
        await asyncio.sleep(0.1)
        assert not daemon.sent

    run(monkeypatch, scenario)


@pytest.mark.parametrize("there", [None, [f"{WAY}/p2p/{HOME}"], ["/ip4/192.168.1.7/tcp/50123"]])
def test_a_relay_connects_peers_only_if_it_sees_where_both_come_from(monkeypatch, there):
    async def scenario(daemon: Daemon) -> None:
        if there is not None:
            daemon.connected[HOME] = there
        assert (await request(daemon)).code == RequestRefused.code
        await asyncio.sleep(0.1)
        assert not daemon.sent

    run(monkeypatch, scenario)


def test_a_relay_says_so_if_it_has_just_lost_the_peer(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        daemon.connected[HOME] = [AT_HOME]
        daemon.lost.add(HOME)
        assert (await request(daemon)).code == PeerLost.code

    run(monkeypatch, scenario)


def test_a_flood_of_requests_is_refused_for_that_network_only(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        daemon.connected[HOME] = [AT_HOME]
        replies = await asyncio.gather(*(request(daemon) for _ in range(3 * int(BURST_OF_NETWORK))))
        passed = sum(isinstance(reply, messages.PunchReply) for reply in replies)
        assert passed == BURST_OF_NETWORK
        await asyncio.sleep(0.1)
        assert len(daemon.sent) == passed
        assert await request(daemon, "/ip4/91.0.0.9/tcp/50123") == messages.PunchReply(AT_HOME)

    run(monkeypatch, scenario)


# The peer that is sought.


def note_dials(monkeypatch: pytest.MonkeyPatch, opens: bool = True) -> list[str]:
    """Have the peer note where it should dial, instead of doing it."""
    dialed: list[str] = []

    async def open_one(puncher: HolePuncher, address: str, timeout_s: float) -> str | None:
        dialed.append(address)
        if not opens:
            await asyncio.sleep(timeout_s)
        return "a socket" if opens else None

    async def pass_on(puncher: HolePuncher, outer: str, address: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(HolePuncher, "_open", open_one)
    monkeypatch.setattr(HolePuncher, "_pass_on", pass_on)
    return dialed


def test_a_peer_dials_where_its_own_relays_say_and_only_public_addresses(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        dialed = note_dials(monkeypatch)
        for sender, address in (
            (ASKER, AT_ASKER),
            (RELAY, "/ip4/192.168.1.1/tcp/8080"),
            (RELAY, "/ip4/127.0.0.1/tcp/8080"),
            (RELAY, "/ip4/45.0.0.9/tcp/25"),
            (RELAY, "/ip4/somewhere/tcp/8080"),
            (RELAY, "/"),
        ):
            for dial in (False, True):
                daemon.puncher.receive(messages.Punch(ASKER, address, dial), sender)
        await asyncio.sleep(0.1)
        assert not dialed
        assert not daemon.dialed
        daemon.puncher.receive(messages.Punch(ASKER, AT_ASKER, False), RELAY)
        daemon.puncher.receive(messages.Punch(ASKER, AT_ASKER, False), RELAY)  # not a second time meanwhile
        daemon.puncher.receive(messages.Punch(ASKER, AT_ASKER, True), RELAY)
        await asyncio.sleep(2 * HEAD_START_S)
        assert dialed == [AT_ASKER]
        assert daemon.dialed == [(ASKER, [AT_ASKER])]

    run(monkeypatch, scenario)


def test_what_a_lying_relay_can_bring_a_peer_to_dial_is_bounded(monkeypatch):
    async def scenario(daemon: Daemon) -> None:
        dialed, ports = note_dials(monkeypatch), itertools.count(2000)

        async def flood() -> None:
            for _ in range(3 * MAX_PUNCHED):
                address = f"/ip4/45.0.0.9/tcp/{next(ports)}"
                daemon.puncher.receive(messages.Punch(ASKER, address, False), RELAY)
            await asyncio.sleep(0.1)

        await flood()
        assert len(dialed) == BURST
        for _ in range(MAX_PUNCHED // 8):
            await asyncio.sleep(BURST / REFILL_PER_S)
            await flood()
        assert len(dialed) == MAX_PUNCHED

    run(monkeypatch, scenario)


def test_a_peer_passes_on_what_comes_and_goes_from_the_port_of_its_daemon_and_is_not_deterred_by_refusals(monkeypatch):
    """The daemon is played by a server that echoes; the other peer is one that accepts, from the second try on."""
    monkeypatch.setattr(hole_punching, "_public_address", lambda address: address)

    async def scenario() -> None:
        seen: list[str] = []

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append("/ip4/{}/tcp/{}".format(*writer.get_extra_info("peername")))
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        inside = await asyncio.start_server(echo, sock=listening)
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        there = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"

        async def identify() -> tuple[PeerID, list[Multiaddr]]:
            return PeerID.from_base58(OWN), [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), Multiaddr(AT_HOME)]

        p2p: Any = SimpleNamespace(peer_id=PeerID.from_base58(OWN), _client=SimpleNamespace(identify=identify))
        puncher = HolePuncher(p2p, lambda peer: stream_pair(OWN, peer)[0], lambda: {RELAY}, lambda: True)
        refusals = 0

        async def dial(port: int, address: str) -> socket.socket:
            nonlocal refusals
            try:
                return await dial_from(port, address)
            except ConnectionRefusedError:
                refusals += 1
                raise

        dial_from = hole_punching._dial_from
        monkeypatch.setattr(hole_punching, "_dial_from", dial)
        async with inside:
            puncher.receive(messages.Punch(ASKER, there, False), RELAY)
            while not refusals:
                await asyncio.sleep(0.01)
            outside = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), sock=silent)
            reader, writer = await accepted.get()
            assert writer.get_extra_info("peername")[1] == port
            data = bytes(range(256)) * 4096
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
            assert puncher.real_address(seen[0]) == there
            writer.close()
            while puncher.real_address(seen[0]) == there:
                await asyncio.sleep(0.01)
            puncher.receive(messages.Punch(ASKER, there, False), RELAY)
            reader, writer = await accepted.get()
            writer.write(b"again")
            assert await reader.readexactly(5) == b"again"
            await puncher.close()
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
            outside.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
