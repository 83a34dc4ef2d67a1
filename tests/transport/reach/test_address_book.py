from __future__ import annotations

from swarm.data_structures import Whereabouts
from swarm.transport.reach import address_book
from swarm.transport.reach.address_book import AddressBook

EVERYWHERE, LAN = ("/ip4/81.2.69.142/tcp/1",), ("/ip4/192.168.0.7/tcp/1",)
WHEREABOUTS = Whereabouts(EVERYWHERE, LAN, "81.2.69.142")


def test_of_a_peer_that_has_announced_nothing_no_address_is_known():
    book = AddressBook()
    assert book.addresses_of("anybody") == ()
    book.learn("anybody", Whereabouts())
    assert book.addresses_of("anybody") == ()


def test_addresses_of_the_same_network_are_for_those_who_are_in_it():
    book = AddressBook()
    book.learn("server", WHEREABOUTS)
    assert book.addresses_of("server") == EVERYWHERE
    book.outer_host = "8.8.8.8"
    assert book.addresses_of("server") == EVERYWHERE
    book.outer_host = "81.2.69.142"
    assert book.addresses_of("server") == (*LAN, *EVERYWHERE)
    assert book.addresses_of("another") == ()


def test_who_does_not_know_its_own_network_is_in_none():
    book = AddressBook()
    book.learn("server", Whereabouts(EVERYWHERE, LAN, ""))
    assert book.addresses_of("server") == EVERYWHERE


def test_in_a_flood_of_peers_those_are_kept_that_were_learned_of_last(monkeypatch):
    monkeypatch.setattr(address_book, "MAX_PEERS", 3)
    book = AddressBook()
    for name in ("a", "b", "c"):
        book.learn(name, WHEREABOUTS)
    book.learn("a", WHEREABOUTS)  # again, so that "b" is the oldest
    book.learn("flood 0", WHEREABOUTS)
    known = {name for name in ("a", "b", "c", "flood 0") if book.addresses_of(name)}
    assert known == {"a", "c", "flood 0"}
    for number in range(100):
        book.learn(f"flood {number}", WHEREABOUTS)
    assert len(book._known) == 3
