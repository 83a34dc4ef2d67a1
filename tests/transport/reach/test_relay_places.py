"""The places that a peer holds at relays, all in memory and on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from swarm.transport.reach import relay_places as module
from swarm.transport.reach.dialer import MAX_FAR_S
from swarm.transport.reach.heartbeat import BEAT_PERIOD_S, BEAT_TIMEOUT_S
from swarm.transport.reach.relay_choice import PLACES, Relay
from swarm.transport.reach.relay_places import (
    ASKED_AT_MOST,
    CHECK_PERIOD_S,
    HURRY_S,
    MAX_LOSSES,
    MIN_PLACES,
    PROVE_PERIOD_S,
    RELAY_TIMEOUT_S,
    RENEW_SHARE,
    RETRY_S,
    STEADY_S,
    RelayPlaces,
)
from tests import virtual_time
from tests.transport.reach.fakes import FakeNetwork, FakeRelay

NOTICED_S = BEAT_PERIOD_S + CHECK_PERIOD_S + BEAT_TIMEOUT_S + RELAY_TIMEOUT_S + 0.1
"""After this time at the latest a relay that says nothing any more is given up."""


def server(number: int) -> FakeRelay:
    return FakeRelay(f"server {number}", f"/ip4/8.{number}.0.1/tcp/31337")


def bootstrap(number: int) -> FakeRelay:
    return FakeRelay(f"bootstrap {number}", f"/ip4/9.{number}.0.1/tcp/31337", is_bootstrap=True)


class Home:
    """A peer that holds places.

    Attributes:
        changes: the relays that it had after each change of which it told.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *relays: FakeRelay) -> None:
        self.net: Any = FakeNetwork(*relays).install(monkeypatch)
        self.known: Sequence[Relay] = [relay.known for relay in relays]
        self.changes: list[tuple[Relay, ...]] = []
        self.places = RelayPlaces(self.net, self.net, self.net.open_notice, self._known_relays, self._note)

    async def _known_relays(self) -> Sequence[Relay]:
        return self.known

    def _note(self) -> None:
        self.changes.append(self.places.relays)

    @property
    def held(self) -> set[str]:
        return {relay.peer_id for relay in self.places.relays}

    @property
    def open_streams(self) -> int:
        return sum(not writer.aborted for writer in self.net.writers)

    async def until_changes(self, count: int, within: float = 60.0) -> None:
        async with asyncio.timeout(within):
            while len(self.changes) < count:
                await asyncio.sleep(0.1)

    async def run_for(self, seconds: float) -> None:
        """Look after the places for so long."""
        running = asyncio.ensure_future(self.places.run())
        await asyncio.sleep(seconds)
        assert not running.done(), "it does not look after its places any more"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(scenario, limit=10 * 86400.0)


def test_a_peer_takes_as_many_places_as_it_needs_and_no_more(monkeypatch):
    async def scenario():
        home = Home(monkeypatch, *map(server, range(8)))
        await home.places.look_after()
        assert len(home.held) == PLACES
        assert sum(relay.reserved for relay in home.net.relays.values()) == PLACES
        await home.run_for(60)
        assert len(home.held) == PLACES
        assert home.changes == [home.places.relays]
        assert home.places.failure == ""
        assert home.open_streams == PLACES  # one heartbeat each
        assert sorted(home.net.proofs) == sorted(relay.circuit() for relay in home.places.relays)

    run(scenario)


def test_a_relay_of_a_private_swarm_is_shown_that_this_peer_is_a_member(monkeypatch):
    async def scenario():
        relay = server(0)
        relay.is_private = True
        home = Home(monkeypatch, relay)
        await home.places.look_after()
        assert home.held == {relay.id}
        relay.status = 202  # it does not believe it any more
        await home.run_for(relay.seconds)
        assert home.held == set()

    run(scenario)


def break_up(relay: FakeRelay) -> None:
    relay.go_down()


def break_connection(relay: FakeRelay) -> None:
    for reader in relay.pinged:
        reader.set_exception(ConnectionResetError())
    relay.pinged.clear()
    relay.is_up = False


def break_silent(relay: FakeRelay) -> None:
    relay.is_silent = True


def break_carrying(relay: FakeRelay) -> None:
    relay.carries = False


def break_status(relay: FakeRelay) -> None:
    relay.status = 201


def answer_raw(raw: bytes) -> Callable[[FakeRelay], None]:
    def break_answer(relay: FakeRelay) -> None:
        relay.raw = raw

    return break_answer


BROKEN = [
    pytest.param(break_up, id="down"),
    pytest.param(break_silent, id="silent"),
    pytest.param(break_carrying, id="grants, but does not carry"),
    pytest.param(break_status, id="full"),
    pytest.param(answer_raw(b"\x14" + b"\xff" * 20), id="garbage"),
]


@pytest.mark.parametrize("breaks", BROKEN)
def test_a_relay_that_gives_no_place_that_works_is_replaced_by_the_next(monkeypatch, breaks):
    async def scenario():
        relays = list(map(server, range(6)))
        for relay in relays[:3]:
            breaks(relay)
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        assert home.held == {relay.id for relay in relays[3:]}
        assert home.open_streams == PLACES
        assert home.places.failure
        assert now() <= 2 * RELAY_TIMEOUT_S, "they are asked one after the other"

    run(scenario)


@pytest.mark.parametrize(
    ("breaks", "was_held", "others"), [(break_up, True, 0), (break_silent, False, 1), (break_status, True, 1)]
)
def test_a_relay_that_fails_is_asked_again_after_a_while_and_not_before(monkeypatch, breaks, was_held, others):
    """Sooner where no place is left."""
    pause_s = RETRY_S if others else HURRY_S

    async def scenario():
        relay = server(0)
        home = Home(monkeypatch, relay, *(server(1 + number) for number in range(others)))
        if was_held:
            await home.places.look_after()
        breaks(relay)
        relay.hang_up()
        await home.places.look_after()
        assert len(home.held) == others
        failed_at, asked = now(), (relay.reserved, len(home.net.proofs))
        healed = FakeRelay("server 0", relay.known.address)
        healed.reserved = relay.reserved
        home.net.relays[relay.id] = healed
        await home.run_for(pause_s - 1)
        assert (healed.reserved, len(home.net.proofs)) == asked
        assert len(home.held) == others
        await home.run_for(CHECK_PERIOD_S + 2)
        assert relay.id in home.held
        assert now() - failed_at < pause_s + CHECK_PERIOD_S + 2

    run(scenario)


def test_bootstrap_peers_are_asked_only_where_others_have_too_few_places(monkeypatch):
    async def scenario():
        enough = Home(monkeypatch, bootstrap(0), bootstrap(1), *map(server, range(MIN_PLACES)))
        await enough.places.look_after()
        assert not any(relay.is_bootstrap for relay in enough.places.relays)
        assert sum(relay.reserved for relay in enough.net.relays.values()) == MIN_PLACES
        few = Home(monkeypatch, *map(bootstrap, range(4)), server(0))
        await few.places.look_after()
        assert [relay.is_bootstrap for relay in few.places.relays] == [False, True]
        none = Home(monkeypatch, *map(bootstrap, range(4)))
        await none.places.look_after()
        assert len(none.held) == MIN_PLACES

    run(scenario)


def test_bootstrap_peers_are_left_when_servers_have_places_again(monkeypatch):
    async def scenario():
        relays = [bootstrap(0), bootstrap(1), server(0), server(1)]
        home = Home(monkeypatch, *relays)
        home.known = [relays[0].known, relays[1].known]
        await home.places.look_after()
        assert home.held == {relays[0].id, relays[1].id}
        home.known = [relay.known for relay in relays]
        await home.run_for(STEADY_S - 1)
        assert home.held == {relay.id for relay in relays}, "others have not yet proven steady"
        await home.run_for(2)
        assert home.held == {relays[2].id, relays[3].id}
        assert home.changes[-1] == home.places.relays
        assert home.open_streams == 2

    run(scenario)


@pytest.mark.parametrize("breaks", [break_up, break_silent, break_connection])
def test_a_relay_that_is_lost_is_noticed_within_seconds_and_replaced(monkeypatch, breaks):
    async def scenario():
        relays = list(map(server, range(4)))
        home = Home(monkeypatch, *relays)
        running = asyncio.ensure_future(home.places.run())
        await asyncio.sleep(1)
        lost = home.net.relays[sorted(home.held)[0]]
        breaks(lost)
        lost_at = now()
        await home.until_changes(2)
        assert now() - lost_at <= NOTICED_S
        assert lost.id in home.net.disconnected
        # Others are told before a new relay is found.
        assert {relay.peer_id for relay in home.changes[1]} == {relay.peer_id for relay in home.changes[0]} - {lost.id}
        await home.until_changes(3)
        assert now() - lost_at <= NOTICED_S + RELAY_TIMEOUT_S
        assert home.changes[2] == home.places.relays
        assert home.held == {relay.id for relay in relays} - {lost.id}
        running.cancel()

    run(scenario)


def test_a_relay_that_grants_places_but_carries_nothing_any_more_is_found_out(monkeypatch):
    async def scenario():
        relays = list(map(server, range(4)))
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        dead = home.net.relays[sorted(home.held)[0]]
        dead.carries = False
        await home.run_for(PROVE_PERIOD_S + CHECK_PERIOD_S + RELAY_TIMEOUT_S)
        assert home.held == {relay.id for relay in relays} - {dead.id}

    run(scenario)


def test_a_doubt_has_all_places_tried_out_at_once(monkeypatch):
    async def scenario():
        relays = list(map(server, range(4)))
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        dead = home.net.relays[sorted(home.held)[0]]
        dead.carries = False
        home.places.doubt()
        await home.places.look_after()
        assert home.held == {relay.id for relay in relays} - {dead.id}
        proofs = len(home.net.proofs)
        await home.run_for(PROVE_PERIOD_S / 2)
        assert len(home.net.proofs) - proofs <= PROVE_PERIOD_S / 2 / RETRY_S + 1  # only of the dead one, now and then

    run(scenario)


@pytest.mark.parametrize(
    "echo",
    [lambda sent: sent[::-1], lambda sent: sent[:-1]],
    ids=["reversed", "too short"],
)
def test_a_relay_that_does_not_echo_what_it_is_sent_is_left(monkeypatch, echo):
    async def scenario():
        relay = server(0)
        home = Home(monkeypatch, relay)
        await home.places.look_after()
        relay.echo, relay.carries = echo, False
        await home.run_for(BEAT_PERIOD_S + CHECK_PERIOD_S + BEAT_TIMEOUT_S)
        assert home.held == set()
        assert home.changes[-1] == ()

    run(scenario)


def test_a_relay_that_has_forgotten_the_connection_is_connected_to_anew_and_keeps_its_place(monkeypatch):
    async def scenario():
        relay = server(0)
        home = Home(monkeypatch, relay)
        running = asyncio.ensure_future(home.places.run())
        await asyncio.sleep(CHECK_PERIOD_S / 2)
        assert relay.reserved == 1
        relay.hang_up()
        await asyncio.sleep(CHECK_PERIOD_S)
        assert relay.reserved == 2
        assert home.net.proofs == [relay.known.circuit()] * 2
        assert home.net.forgotten == [relay.id]  # or it would send others over the connection from before
        assert home.net.connected == home.held == {relay.id}
        # That it was lost is told before it is tried to get it again.
        assert home.changes == [(relay.known,), (), (relay.known,)]
        running.cancel()

    run(scenario)


def test_a_lost_relay_is_told_before_it_is_connected_to_anew_however_long_that_takes(monkeypatch):
    async def scenario():
        relay = server(0)
        home = Home(monkeypatch, relay)
        running = asyncio.ensure_future(home.places.run())
        await home.until_changes(1)
        relay.is_silent = True
        relay.hang_up()
        lost_at = now()
        await home.until_changes(2)
        assert now() - lost_at <= CHECK_PERIOD_S + 0.1
        assert home.places.relays == ()
        assert home.places.is_regaining
        await home.until_changes(3)  # that it was given up
        assert now() - lost_at >= RELAY_TIMEOUT_S
        assert home.places.relays == ()
        assert not home.places.is_regaining
        running.cancel()

    run(scenario)


def test_a_relay_is_not_being_regained_while_another_one_is_held(monkeypatch):
    async def scenario():
        relays = list(map(server, range(2)))
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        relays[0].is_silent = True
        relays[0].hang_up()
        looking = asyncio.ensure_future(home.places.look_after())
        await asyncio.sleep(1)
        assert home.held == {relays[1].id}
        assert not home.places.is_regaining
        await looking

    run(scenario)


def test_a_relay_that_keeps_ending_connections_is_given_up_for_one_that_does_not(monkeypatch):
    async def scenario():
        relays = list(map(server, range(4)))
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        dropping = home.net.relays[sorted(home.held)[0]]
        for _ in range(MAX_LOSSES):
            assert dropping.id in home.held
            dropping.hang_up()
            await home.places.look_after()
        assert home.held == {relay.id for relay in relays} - {dropping.id}
        assert dropping.reserved == MAX_LOSSES
        await home.run_for(5 * RETRY_S)
        assert dropping.reserved == MAX_LOSSES, "it is asked although enough others give places"

    run(scenario)


def test_servers_that_keep_ending_connections_do_not_cost_a_peer_its_places_at_bootstrap_peers(monkeypatch):
    async def scenario():
        honest = [bootstrap(0), bootstrap(1)]
        dropping = list(map(server, range(3)))
        home = Home(monkeypatch, *honest, *dropping)
        running = asyncio.ensure_future(home.places.run())
        held_from = None
        for _ in range(100):
            await asyncio.sleep(3.0)
            for relay in dropping:
                relay.hang_up()
            if held_from is None and home.held >= {relay.id for relay in honest}:
                held_from = now()
            assert held_from is None or home.held >= {relay.id for relay in honest}
        assert held_from is not None
        assert held_from <= (MAX_LOSSES + 1) * 3.0
        running.cancel()

    run(scenario)


def test_a_relay_that_loses_a_connection_now_and_then_is_kept(monkeypatch):
    async def scenario():
        relays = list(map(server, range(4)))
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        held = home.held
        for _ in range(3 * MAX_LOSSES):
            home.net.relays[sorted(held)[0]].hang_up()
            await home.run_for(STEADY_S + 1)
            assert home.held == held

    run(scenario)


def test_relays_that_always_fail_do_not_keep_a_peer_from_others_or_from_its_places(monkeypatch):
    async def scenario():
        bad = [server(number) for number in range(40)]
        good = server(99)
        for relay in bad:
            relay.is_silent = True
        home = Home(monkeypatch, good, *bad)

        def good_last(own_id: str, relays: Sequence[Relay], held: Sequence[Relay]) -> list[Relay]:
            return sorted(set(relays) - set(held), key=lambda relay: relay == good.known)

        monkeypatch.setattr(module, "order_to_ask", good_last)

        running = asyncio.ensure_future(home.places.run())
        await home.until_changes(1, within=len(bad) / PLACES * RELAY_TIMEOUT_S + 60)
        assert home.held == {good.id}
        await asyncio.sleep(1)  # others are being asked
        good.hang_up()
        lost_at = now()
        await home.until_changes(2)
        assert now() - lost_at <= ASKED_AT_MOST / (PLACES - 1) * RELAY_TIMEOUT_S + CHECK_PERIOD_S + 0.1
        running.cancel()

    run(scenario)


def test_what_failed_is_forgotten_with_the_relay(monkeypatch):
    async def scenario():
        home = Home(monkeypatch)
        for number in range(100):
            relay = server(number % 250)
            relay.status = 201
            home.net.relays = {relay.id: relay}
            home.known = [relay.known]
            await home.places.look_after()
        assert len(home.places._failed_at) <= 2

    run(scenario)


def test_if_all_relays_fail_at_first_they_are_asked_once_more(monkeypatch):
    async def scenario():
        relays = list(map(server, range(2)))
        home = Home(monkeypatch, *relays)
        for relay in relays:
            relay.go_down()
        beginning = asyncio.ensure_future(home.places.begin())
        await asyncio.sleep(HURRY_S / 2)
        for relay in relays:
            home.net.relays[relay.id] = FakeRelay("again", relay.known.address)
            home.net.relays[relay.id].known = relay.known
        await beginning
        assert home.held == {relay.id for relay in relays}

    run(scenario)


def test_nothing_stays_open_of_places_that_are_not_held_any_more(monkeypatch):
    async def scenario():
        home = Home(monkeypatch, *map(server, range(5)))
        await home.places.look_after()
        for relay in list(home.net.relays.values())[:3]:
            relay.go_down()
        await home.run_for(RETRY_S + NOTICED_S)
        assert home.open_streams == len(home.held) == 2
        home.places.close()
        assert home.places.relays == ()
        assert home.open_streams == 0

    run(scenario)


def test_places_are_renewed_before_they_end(monkeypatch):
    monkeypatch.setattr(module, "CHECK_PERIOD_S", 60.0)

    async def scenario():
        relays = list(map(server, range(3)))
        home = Home(monkeypatch, *relays)
        await home.run_for(10 * 3600)
        assert len(home.changes) == 1
        for relay in relays:
            assert 10 / RENEW_SHARE - 2 <= relay.reserved <= 10 / RENEW_SHARE + 2

    run(scenario)


def test_a_relay_that_does_not_renew_a_place_is_lost(monkeypatch):
    async def scenario():
        relays = list(map(server, range(4)))
        for relay in relays:
            relay.seconds = 60
        home = Home(monkeypatch, *relays)
        await home.places.look_after()
        stubborn = home.net.relays[sorted(home.held)[0]]
        stubborn.status = 200
        await home.run_for(60 * RENEW_SHARE + CHECK_PERIOD_S)
        assert stubborn.id not in home.held
        assert len(home.held) == PLACES

    run(scenario)


def test_what_cannot_be_a_relay_is_passed_over(monkeypatch):
    async def scenario():
        good = server(0)
        home = Home(monkeypatch, good)
        home.known = [
            Relay("no peer id", "/ip4/8.8.8.8/tcp/1"),
            Relay(good.id[::-1], "/ip4/8.9.8.8/tcp/1"),
            Relay(server(1).id, "/ip4/8.10.8.8/tcp/70000"),
            Relay(server(2).id, "/ip4/relay.example/tcp/1"),
            good.known,
        ]
        await home.places.look_after()
        assert home.held == {good.id}

    run(scenario)


def test_a_relay_that_has_a_name_is_announced_by_its_address(monkeypatch):
    async def scenario():
        relay = FakeRelay("named", "/dns4/relay.example/tcp/31337", is_bootstrap=True)
        relay.listed = ["/ip4/127.0.0.1/tcp/31337", "/ip4/8.8.4.4/udp/31337/quic", "/ip4/8.8.8.8/tcp/31337"]
        home = Home(monkeypatch, relay)
        await home.places.look_after()
        (held,) = home.places.relays
        assert held.circuit() == f"/ip4/8.8.8.8/tcp/31337/p2p/{relay.id}/p2p-circuit"
        assert home.net.proofs == [held.circuit()]
        relay.listed = ["/ip4/127.0.0.1/tcp/31337"]  # the name leads nowhere
        again = Home(monkeypatch, relay)
        await again.places.look_after()
        assert again.places.relays == ()
        assert "has no address that others could dial" in again.places.failure

    run(scenario)


@pytest.mark.parametrize(("seconds", "more"), [(0.1, 1.0), (2.0, MAX_FAR_S)])
def test_a_relay_that_is_far_away_gets_more_time_to_carry_a_first_connection(monkeypatch, seconds, more):
    async def scenario():
        relay = server(0)
        home = Home(monkeypatch, relay)
        relay.echo = None
        looking = asyncio.ensure_future(home.places.look_after())
        await asyncio.sleep(seconds)
        home.net.echo_late()
        await looking
        assert home.held == {relay.id}
        assert home.net.patience == [pytest.approx(RELAY_TIMEOUT_S + more)]

    run(scenario)
