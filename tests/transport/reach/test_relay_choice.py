from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.transport.addresses import is_circuit
from swarm.transport.reach.relay_choice import Relay, network_of, order_to_ask
from tests.transport.reach.fakes import peer_id

hosts = st.builds("8.{}.0.{}".format, st.integers(1, 4), st.integers(1, 9)) | st.just("relay.example")
relays = st.builds(
    lambda number, host, is_bootstrap: Relay(
        f"peer {number}", f"/{'dns4' if host == 'relay.example' else 'ip4'}/{host}/tcp/1", is_bootstrap
    ),
    st.integers(0, 30),
    hosts,
    st.booleans(),
)
sets_of_relays = st.lists(relays, max_size=12, unique_by=lambda relay: relay.peer_id)


def at(number: int) -> Relay:
    return Relay(f"peer {number}", f"/ip4/8.{number}.0.1/tcp/1")


@given(st.text(max_size=5), sets_of_relays, st.data())
def test_every_relay_without_a_place_is_asked_once_and_bootstrap_peers_last(own_id, known, data):
    held = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
    ordered = order_to_ask(own_id, known, held)
    assert Counter(ordered) == Counter(set(known) - set(held))
    assert [relay.is_bootstrap for relay in ordered] == sorted(relay.is_bootstrap for relay in ordered)


@given(st.text(max_size=5), sets_of_relays, st.data())
def test_of_each_kind_those_in_new_networks_come_first(own_id, known, data):
    held = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
    taken = {network_of(relay.address) for relay in held}
    for is_bootstrap in (False, True):
        group = [one for one in order_to_ask(own_id, known, held) if one.is_bootstrap == is_bootstrap]
        news = []
        for relay in group:
            news.append(network_of(relay.address) not in taken)
            taken.add(network_of(relay.address))
        assert news == sorted(news, reverse=True)


@given(st.text(max_size=5), sets_of_relays, st.data())
def test_the_order_in_which_relays_are_known_does_not_matter(own_id, known, data):
    mixed = data.draw(st.permutations(known))
    assert order_to_ask(own_id, known, []) == order_to_ask(own_id, mixed, [])


@given(st.text(max_size=5), st.sets(st.integers(0, 50), min_size=1, max_size=12).map(sorted), st.data())
def test_a_relay_that_goes_leaves_the_order_of_the_others_as_it_was(own_id, numbers, data):
    gone = at(data.draw(st.sampled_from(numbers)))
    ordered = order_to_ask(own_id, list(map(at, numbers)), [])
    without = order_to_ask(own_id, [at(number) for number in numbers if at(number) != gone], [])
    assert without == [relay for relay in ordered if relay != gone]


def test_a_place_in_the_same_network_is_only_for_want_of_others():
    one, neighbor, stranger = (
        Relay("one", "/ip4/8.1.0.1/tcp/1"),
        Relay("neighbor", "/ip4/8.1.200.1/tcp/1"),
        Relay("stranger", "/ip4/9.9.9.9/tcp/1"),
    )
    for number in range(20):
        own_id = f"home {number}"
        assert order_to_ask(own_id, [one, neighbor, stranger], [one]) == [stranger, neighbor]
        assert order_to_ask(own_id, [one, neighbor, stranger], [])[2] in (one, neighbor)


def test_homes_spread_over_the_relays():
    known = list(map(at, range(10)))
    first = Counter(order_to_ask(f"home {number}", known, [])[0] for number in range(500))
    assert set(first) == set(known)
    assert max(first.values()) < 3 * min(first.values())


def test_what_probably_fails_together():
    for address, network in [
        ("/ip4/8.8.4.4/tcp/31337", "8.8.0.0/16"),
        ("/ip4/8.8.200.1/tcp/1", "8.8.0.0/16"),
        ("/ip4/8.9.8.8/tcp/1", "8.9.0.0/16"),
        ("/ip6/2a02:8071:b783::1/tcp/1", "2a02:8071::/32"),
        ("/ip6/2a02:8071:ffff::1/tcp/1", "2a02:8071::/32"),
        ("/dns4/relay.example/tcp/31337", "relay.example"),
    ]:
        assert network_of(address) == network


def test_the_way_through_a_relay_is_an_address_that_may_be_announced():
    way = Relay(peer_id("relay"), "/ip4/8.8.8.8/tcp/31337").circuit()
    assert way == f"/ip4/8.8.8.8/tcp/31337/p2p/{peer_id('relay')}/p2p-circuit"
    assert is_circuit(way)
