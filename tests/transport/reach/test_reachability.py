"""How a peer finds out whether others reach it: the others are played in memory, and time is virtual."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest

from swarm.data_structures import Whereabouts
from swarm.errors import PeerLost, RequestRefused
from swarm.protocol import messages
from swarm.protocol.messages import DialBackReply
from swarm.transport.reach import reachability as module
from swarm.transport.reach.address_book import AddressBook
from swarm.transport.reach.heartbeat import BEAT_PERIOD_S, BEAT_TIMEOUT_S
from swarm.transport.reach.reach_estimate import Reach
from swarm.transport.reach.reachability import (
    CHECK_PERIOD_S,
    JUDGES,
    SETTLE_S,
    UNANSWERED_TRIES,
    WATCH_PERIOD_S,
    Reachability,
    ReachOptions,
)
from swarm.transport.reach.relay_choice import Relay
from swarm.transport.reach.relay_places import RELAY_TIMEOUT_S
from tests import virtual_time
from tests.memory_hub import stream_pair
from tests.transport.reach.fakes import FakeNetwork, FakeRelay, peer_id

HOST, LAN, SIX = "81.2.69.142", "192.168.0.7", "2a02:8071:b783::1"
OWN = (f"/ip4/{LAN}/tcp/31337", "/ip4/127.0.0.1/tcp/31337")
DIRECT = f"/ip4/{HOST}/tcp/31337"
QUICKLY = 60.0


class World:
    """A peer "home" behind a router, and others that it asks.

    Attributes:
        host: from where the others see it come.
        open: the ports at which it answers.
        silent: those of the others that do not answer, or that cannot be reached.
        refusing: those that answer with a refusal.
        asked: whom it has asked, with the ports, in order.
        served: what the DHT was told, in order.
        changes: how often it told of a change.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *relays: FakeRelay,
        initial: int = 1,
        known: int = 0,
        own: Sequence[str] = OWN,
        **options: object,
    ) -> None:
        self.net: Any = FakeNetwork(*relays, own=own).install(monkeypatch)
        monkeypatch.setattr(module, "Dialer", lambda: self.net)
        self.host = HOST
        self.open: set[int] = set()
        self.silent: set[str] = set()
        self.refusing: set[str] = set()
        self.says: dict[str, DialBackReply] = {}
        self.asked: list[tuple[str, list[int]]] = []
        self.served: list[bool] = []
        self.changes = 0
        self.initial = [peer_id(f"initial {number}") for number in range(initial)]
        self.known = [peer_id(f"known {number}") for number in range(known)]
        addresses = [f"/ip4/9.9.{number}.9/tcp/1/p2p/{one}" for number, one in enumerate(self.initial)]
        self.book = AddressBook()
        self.streams: list[Any] = []
        self.reach = Reachability(
            self.net,
            ReachOptions(**{"initial_peers": addresses, "is_local": False, **options}),
            self._open_stream,
            lambda: list(self.known),
            self._serve,
            self.book,
        )
        self.reach.changed = self._note
        self.reach.relay_source = self._relays
        self.relays = [relay.known for relay in relays]
        self._judging: set[asyncio.Task[None]] = set()

    async def _relays(self) -> Sequence[Relay]:
        return self.relays

    async def _serve(self, wanted: bool) -> None:
        self.served.append(wanted)

    def _note(self) -> None:
        self.changes += 1

    async def _open_stream(self, peer: str) -> Any:
        if peer in self.silent:
            raise PeerLost("it cannot be reached")
        ours, theirs = stream_pair("home", peer)
        self.streams.append(ours)
        task = asyncio.ensure_future(self._judge(peer, theirs))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)
        return ours

    async def _judge(self, peer: str, stream: Any) -> None:
        request = messages.decode_reachability((await stream.receive(0)).header)
        if isinstance(request, messages.ForgetConnections):
            stream.close()
            return
        assert isinstance(request, messages.DialBackRequest)
        self.asked.append((peer, request.ports))
        if peer in self.refusing:
            await stream.send(messages.refusal(RequestRefused("too many requests")))
        else:
            reached = [port for port in request.ports if port in self.open]
            await stream.send(self.says.get(peer) or DialBackReply(self.host, reached))

    @property
    def judges(self) -> list[str]:
        return [peer for peer, _ in self.asked]

    async def find_out(self) -> None:
        """Start, and wait until it is known how this peer is reached."""
        self.reach.start()
        async with asyncio.timeout(QUICKLY):
            await self.reach.known.wait()

    async def until(self, condition: Callable[[], object], within: float = QUICKLY) -> None:
        async with asyncio.timeout(within):
            while not condition():
                await asyncio.sleep(0.1)


def run(world: World, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scenario(world)
        finally:
            await world.reach.close()
        assert all(stream._writer._closed for stream in world.streams)

    virtual_time.run(whole)


def servers(numbers: Iterable[int]) -> list[FakeRelay]:
    return [FakeRelay(f"server {number}", f"/ip4/8.{number}.0.1/tcp/31337") for number in numbers]


def test_a_peer_that_others_reach_is_announced_where_they_do(monkeypatch):
    async def scenario(world):
        world.open = {31337}
        await world.find_out()
        assert world.reach.reach is Reach.DIRECT
        assert world.reach.whereabouts == Whereabouts((DIRECT,), (OWN[0],), HOST)
        assert (world.reach.is_reachable, world.reach.is_relayed, world.reach.may_relay) == (True, False, True)
        assert world.book.outer_host == HOST
        assert world.served == [True]
        assert world.changes == 1
        assert world.net.proofs == []
        assert world.reach.describe().startswith("reached directly")
        assert DIRECT in world.reach.describe()
        assert world.reach.advise() == ""

    run(World(monkeypatch, *servers(range(3))), scenario)


def test_a_peer_that_others_do_not_reach_takes_places_at_relays_before_it_says_anything(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert world.reach.reach is Reach.HIDDEN
        assert (world.reach.is_reachable, world.reach.is_relayed, world.reach.may_relay) == (True, True, False)
        ways = tuple(relay.circuit() for relay in world.reach.places.relays)
        assert len(ways) == 3
        assert world.reach.whereabouts == Whereabouts(ways, (OWN[0],), HOST)
        assert world.served == [False]
        assert world.changes == 1
        assert "reached through relays" in world.reach.describe()
        assert "port 31337" in world.reach.advise()

    run(World(monkeypatch, *servers(range(3))), scenario)


def test_a_hidden_peer_without_relays_is_not_reached_and_says_what_to_do(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert world.reach.reach is Reach.HIDDEN
        assert not world.reach.is_reachable
        assert world.reach.whereabouts == Whereabouts((), (OWN[0],), HOST)
        assert "not reached at all" in world.reach.describe()
        assert "port 31337" in world.reach.advise()

    run(World(monkeypatch), scenario)


def test_a_peer_of_one_machine_asks_nobody_and_announces_nothing(monkeypatch):
    async def scenario(world):
        world.reach.start()
        assert world.reach.known.is_set()
        await asyncio.sleep(3 * CHECK_PERIOD_S)
        assert world.asked == []
        assert world.reach.whereabouts == Whereabouts()
        assert (world.reach.is_reachable, world.reach.is_relayed, world.reach.may_relay) == (True, False, False)
        assert "from this machine only" in world.reach.describe()

    run(World(monkeypatch, is_local=True), scenario)


def test_the_first_peer_of_a_swarm_believes_that_it_can_be_reached(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert asyncio.get_running_loop().time() < 1.0
        assert world.reach.reach is Reach.DIRECT
        assert (world.reach.is_reachable, world.reach.may_relay) == (True, False)
        assert world.reach.whereabouts == Whereabouts((), (OWN[0],), "")
        assert world.served == [True]
        assert "no other peer has said yet" in world.reach.describe()

    run(World(monkeypatch, initial=0), scenario)


def test_a_peer_to_which_nobody_answers_tries_again_before_it_believes_anything(monkeypatch):
    async def scenario(world):
        world.silent = set(world.initial)
        world.reach.start()
        await asyncio.sleep((UNANSWERED_TRIES - 1.5) * SETTLE_S)
        assert not world.reach.known.is_set()
        await world.until(world.reach.known.is_set, 2 * SETTLE_S)
        assert world.reach.reach is Reach.DIRECT
        assert not world.reach.may_relay

    run(World(monkeypatch, initial=2), scenario)


def test_a_peer_that_believed_to_be_reachable_finds_out_that_it_is_not(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert world.reach.reach is Reach.DIRECT
        world.known = [peer_id("newcomer")]
        await world.until(lambda: world.reach.reach is Reach.HIDDEN, 2 * CHECK_PERIOD_S)
        assert world.changes == 2
        assert world.served == [True] * 2, "strangers have stopped the DHT of a peer by which others join"

    run(World(monkeypatch, *servers(range(3)), initial=0), scenario)


def test_others_are_asked_in_place_of_those_who_do_not_answer(monkeypatch):
    async def scenario(world):
        world.silent, world.refusing = set(world.initial[:2]), {world.initial[2]}
        world.open = {31337}
        await world.find_out()
        assert world.reach.reach is Reach.DIRECT
        assert set(world.judges[:2]) == {*world.initial[2:4]}  # initial peers first
        assert len(set(world.judges) - world.refusing) == len(world.judges) - 1 == JUDGES
        assert all(ports == [31337] for _, ports in world.asked)

    run(World(monkeypatch, initial=4, known=3), scenario)


def test_not_more_than_twice_as_many_are_asked_however_many_refuse(monkeypatch):
    async def scenario(world):
        world.refusing = set(world.initial) | set(world.known)
        await world.find_out()
        assert len(world.asked) == UNANSWERED_TRIES * 2 * JUDGES

    run(World(monkeypatch, initial=1, known=50), scenario)


def test_one_liar_among_the_judges_changes_nothing(monkeypatch):
    async def scenario(world):
        world.says = {world.initial[0]: DialBackReply(HOST, [31337])}
        await world.find_out()
        assert world.reach.reach is Reach.HIDDEN
        world.says = {world.initial[0]: DialBackReply("8.8.8.8", [31337])}
        world.reach.look_again()
        await asyncio.sleep(3)
        assert world.reach.reach is Reach.HIDDEN
        assert world.book.outer_host == HOST

    run(World(monkeypatch, initial=3), scenario)


def test_one_liar_cannot_give_a_hidden_peer_an_address_of_another_kind(monkeypatch):
    async def scenario(world):
        world.says = {world.initial[0]: DialBackReply(SIX, [31337])}
        await world.find_out()
        assert world.reach.reach is Reach.HIDDEN
        assert not world.reach.may_relay
        assert not any("/ip6/" in address for address in world.reach.whereabouts.addresses)

    run(World(monkeypatch, *servers(range(3)), initial=3), scenario)


def test_who_is_reached_by_ipv6_only_takes_places_at_relays_as_well(monkeypatch):
    async def scenario(world):
        world.says = {world.initial[0]: DialBackReply(SIX, [31337])}
        await world.find_out()
        assert world.reach.reach is Reach.DIRECT
        ways = tuple(relay.circuit() for relay in world.reach.places.relays)
        assert len(ways) == 3
        assert world.reach.whereabouts.addresses == (f"/ip6/{SIX}/tcp/31337", *ways)
        assert world.book.outer_host == HOST

    run(World(monkeypatch, *servers(range(3)), initial=3, own=[*OWN, f"/ip6/{SIX}/tcp/31337"]), scenario)


def test_ports_of_the_peer_are_tried_those_given_by_hand_first_and_four_at_most(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert world.asked[0][1] == [5000, 4, 3, 1]

    own = [
        "/ip4/192.168.0.7/tcp/1",
        "/ip4/192.168.0.7/tcp/2/ws",
        "/ip4/81.2.69.142/tcp/3",
        "/ip4/81.2.69.140/tcp/4",
        "/ip4/127.0.0.1/tcp/5",
        "/ip4/192.168.0.8/tcp/6",
        "/ip4/192.168.0.7/udp/7/quic",
    ]
    run(World(monkeypatch, own=own, announced=["/dns4/home.example/tcp/5000"]), scenario)


@pytest.mark.parametrize(
    ("given", "seen_at", "reach", "announced"),
    [
        ("/ip4/8.8.8.8/tcp/5000", HOST, Reach.DIRECT, ("/ip4/8.8.8.8/tcp/5000",)),
        ("/dns4/home.example/tcp/5000", HOST, Reach.DIRECT, ()),  # others would have to resolve it
        (f"/ip4/{HOST}/tcp/5000", HOST, Reach.HIDDEN, ()),  # others dialed it and failed
        # A packet does not always leave where one comes in; the one address is the beginning of the other.
        (f"/ip4/{HOST}/tcp/5000", HOST[:-1], Reach.DIRECT, (f"/ip4/{HOST}/tcp/5000",)),
    ],
)
def test_addresses_given_by_hand_are_believed_unless_others_tried_them(monkeypatch, given, seen_at, reach, announced):
    async def scenario(world):
        world.host = seen_at
        await world.find_out()
        assert world.reach.reach is reach
        assert world.reach.whereabouts.addresses == announced

    run(World(monkeypatch, announced=[given]), scenario)


def test_a_peer_that_can_be_reached_no_longer_finds_out_within_minutes(monkeypatch):
    async def scenario(world):
        world.open = {31337}
        await world.find_out()
        world.open = set()
        await world.until(lambda: world.reach.reach is Reach.HIDDEN, 1.2 * CHECK_PERIOD_S + 5)
        assert len(world.reach.whereabouts.addresses) == 3
        world.open = {31337}
        await world.until(lambda: world.reach.reach is Reach.DIRECT, 1.2 * CHECK_PERIOD_S + 5)
        assert world.reach.whereabouts.addresses == (DIRECT,)
        streams = len(world.net.writers)
        await asyncio.sleep(5 * BEAT_PERIOD_S)
        assert len(world.net.writers) == streams, "it still holds places"
        assert world.served == [True, False, True]
        assert world.changes == 3

    run(World(monkeypatch, *servers(range(3)), initial=3), scenario)


def test_where_nothing_changes_only_one_peer_is_asked_now_and_then(monkeypatch):
    async def scenario(world):
        world.open = {31337}
        await world.find_out()
        before = len(world.asked)
        await asyncio.sleep(10 * CHECK_PERIOD_S)
        assert 8 <= len(world.asked) - before <= 13
        assert world.changes == 1

    random.seed(1)
    run(World(monkeypatch, initial=3), scenario)


def test_a_peer_whose_router_has_another_address_now_announces_it(monkeypatch):
    async def scenario(world):
        world.open = {31337}
        await world.find_out()
        world.host = "8.8.8.8"
        await world.until(lambda: world.reach.whereabouts.outer_host == "8.8.8.8", 1.2 * CHECK_PERIOD_S + 5)
        assert world.reach.whereabouts.addresses == ("/ip4/8.8.8.8/tcp/31337",)
        assert world.changes == 2

    run(World(monkeypatch, initial=3), scenario)


def test_new_addresses_of_the_own_machine_are_noticed_within_seconds(monkeypatch):
    async def scenario(world):
        world.open = {31337}
        await world.find_out()
        world.net.own = ["/ip4/10.0.0.7/tcp/31337"]
        changed = Whereabouts((DIRECT,), ("/ip4/10.0.0.7/tcp/31337",), HOST)
        await world.until(lambda: world.reach.whereabouts == changed, WATCH_PERIOD_S + SETTLE_S + 1)
        await asyncio.sleep(1)
        assert world.changes == 2

    run(World(monkeypatch), scenario)


def test_a_peer_that_connects_to_its_only_relay_again_says_so_and_gives_no_advice(monkeypatch):
    async def scenario(world):
        await world.find_out()
        relay.is_silent = True
        relay.hang_up()
        await world.until(lambda: world.changes == 2, 1.0)
        assert not world.reach.is_reachable
        assert "it has lost its relays, and connects to them again" in world.reach.describe()
        assert world.reach.advise() == ""
        await world.until(lambda: world.changes == 3, RELAY_TIMEOUT_S + 1)
        assert "not reached at all" in world.reach.describe()
        assert "ask for a peer that is reached directly" in world.reach.advise()

    relay = servers([1])[0]
    run(World(monkeypatch, relay), scenario)


def test_a_relay_that_is_lost_is_told_at_once_and_everything_is_looked_at_again(monkeypatch):
    async def scenario(world):
        await world.find_out()
        asked = len(world.asked)
        lost = world.net.relays[world.reach.places.relays[0].peer_id]
        lost.is_silent = True
        within = BEAT_PERIOD_S + BEAT_TIMEOUT_S + 1
        await world.until(lambda: lost.known.circuit() not in world.reach.whereabouts.addresses, within)
        await world.until(lambda: world.changes == 2, 0.2)
        await world.until(lambda: len(world.asked) > asked, SETTLE_S + 1)
        await world.until(lambda: len(world.reach.whereabouts.addresses) == 3)

    run(World(monkeypatch, *servers(range(4))), scenario)


def test_initial_peers_relay_where_no_server_does_but_no_peer_relays_for_itself(monkeypatch):
    async def scenario(world):
        world.relays = [Relay(world.net.peer_id.to_base58(), "/ip4/8.8.8.8/tcp/1")]
        await world.find_out()
        assert [relay.peer_id for relay in world.reach.places.relays] == [one.id for one in relays]
        assert world.reach.places.failure == ""  # nobody else was asked

    relays = [FakeRelay("bootstrap", "/ip4/9.1.1.1/tcp/1", is_bootstrap=True)]
    home, behind = peer_id("home"), peer_id("behind")
    addresses = [
        f"/ip4/9.1.1.1/tcp/1/p2p/{relays[0].id}",
        f"/ip4/9.2.1.1/tcp/1/p2p/{home}",
        f"/ip4/9.1.1.1/tcp/1/p2p/{relays[0].id}/p2p-circuit/p2p/{behind}",
        f"/p2p/{peer_id('somewhere')}",
    ]
    run(World(monkeypatch, *relays, initial_peers=addresses), scenario)


def test_a_server_that_relays_counts_as_a_server_although_it_is_an_initial_peer(monkeypatch):
    async def scenario(world):
        await world.find_out()
        assert [relay.is_bootstrap for relay in world.reach.places.relays] == [False]

    (relay,) = servers([1])
    run(World(monkeypatch, relay, initial_peers=[f"{relay.known.address}/p2p/{relay.id}"]), scenario)


def test_a_client_only_learns_from_where_it_is_seen(monkeypatch):
    async def scenario(world):
        world.silent = {world.initial[0]}
        await world.find_out()
        assert world.book.outer_host == HOST
        assert world.asked == [(world.initial[1], [])]
        await asyncio.sleep(3 * CHECK_PERIOD_S)
        assert len(world.asked) == 1
        assert world.served == []

    run(World(monkeypatch, initial=3, listens=False), scenario)


def test_it_can_end_while_it_finds_out(monkeypatch):
    async def scenario(world):
        for relay in world.net.relays.values():
            relay.is_silent = True
        world.reach.start()
        await asyncio.sleep(0.5)
        await world.reach.close()
        assert world.net.closed
        asked, streams = len(world.asked), len(world.net.writers)
        await asyncio.sleep(3 * CHECK_PERIOD_S)
        assert (len(world.asked), len(world.net.writers)) == (asked, streams)

    run(World(monkeypatch, *servers(range(3))), scenario)
