"""Who has points where: the accounts of one server under any history, and what it accepts as signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import PointsFileError, ProtocolViolation
from swarm.protocol.messages import Points, Signed
from swarm.transport.identity import Identity, load_or_create
from swarm.trust.points import (
    EXPOSURE,
    MAX_OWNERS,
    REPAID,
    UNSIGNED_HALF_LIFE_S,
    Grant,
    Ledger,
    Owner,
    Spender,
    Tab,
    encode_owners,
    read_claim,
    read_owners,
    read_points,
    sign_claim,
)

HERE, PARTNER, STRANGER, VOUCHER = "Here", "Partner", "Stranger", "Voucher"
TAB = Signed(b"", b"", b"")


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("points") / "owner")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("points") / "other")


def test_whoever_served_us_is_repaid_once():
    ledger = Ledger(HERE)
    spender = Spender(PARTNER, {HERE: 100})
    assert ledger.credit(spender, 0.0) == 100 * REPAID
    ledger.charge(spender, 100 * REPAID - 30, 0.0)
    assert ledger.credit(spender, 0.0) == 30
    ledger.charge(spender, 70, 0.0)
    assert ledger.credit(spender, 0.0) == 0
    assert ledger.credit(Spender(PARTNER, {HERE: 150}), 0.0) == 50 * REPAID  # what was beyond its points was free
    assert ledger.credit(Spender(PARTNER, {HERE: 10}), 0.0) == 50 * REPAID  # an older tab takes nothing away


def test_a_strangers_word_and_ones_own_are_worth_nothing():
    ledger = Ledger(HERE)
    assert ledger.credit(Spender(PARTNER, {STRANGER: 10**9, PARTNER: 10**9}), 0.0) == 0
    ledger.charge(Spender(HERE, {HERE: 10**9, STRANGER: 10**9}), 100, 0.0)
    assert not any(one.size for one in ledger.owners.values())
    with pytest.raises(ProtocolViolation, match="of no use"):
        ledger.sign(Tab(PARTNER, STRANGER, 5), TAB, 0.0)
    with pytest.raises(ProtocolViolation, match="of no use"):
        ledger.sign(Tab(HERE, HERE, 5), TAB, 0.0)


def test_whom_we_owe_can_vouch_for_others_and_pays_for_it():
    ledger = Ledger(HERE)
    assert ledger.credit(Spender(PARTNER, {HERE: 50}), 0.0) == 50 * REPAID == 100
    friend = Spender(STRANGER, {PARTNER: 60})
    assert ledger.credit(friend, 0.0) == 60
    ledger.charge(friend, 50, 0.0)
    assert ledger.credit(friend, 0.0) == 10
    assert ledger.credit(Spender(PARTNER, {}), 0.0) == 50
    many = [Spender(f"Key{number}", {PARTNER: 60}) for number in range(10)]
    for one in many:
        ledger.charge(one, 60, 0.0)
    assert ledger.credit(Spender(PARTNER, {}), 0.0) == 0


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([PARTNER, STRANGER, "Key1", "Key2", HERE]),
            st.dictionaries(st.sampled_from([HERE, PARTNER, STRANGER, VOUCHER, "Key1"]), st.integers(0, 500)),
            st.integers(0, 1000),
        )
    )
)
def test_nobody_spends_what_was_not_given(history):
    """Service for points is never more than twice what was had of others, and the exposure to a voucher."""
    ledger = Ledger(HERE, [VOUCHER])
    paid, given_most = 0, dict[str, int]()
    for peer, tabs, amount in history:
        tabs.pop(peer, None)  # `read_points` refuses it
        spender = Spender(peer, tabs)
        credit = ledger.credit(spender, 0.0)
        if peer != HERE and tabs.get(HERE):
            given_most[peer] = max(given_most.get(peer, 0), tabs[HERE])
        ledger.charge(spender, amount, 0.0)
        ledger.owners.get(peer, Owner()).unsigned = 0.0  # it signs for everything
        if peer == HERE:
            assert ledger.credit(spender, 0.0) == credit  # it is always served first
            continue
        paid += min(credit, amount)
        assert ledger.credit(spender, 0.0) == credit - min(credit, amount)
    assert paid <= REPAID * sum(given_most.values()) + EXPOSURE
    assert all(one.spent + one.vouched <= REPAID * one.given for peer, one in ledger.owners.items() if peer != VOUCHER)


def test_who_does_not_sign_loses_its_points_for_some_hours():
    ledger = Ledger(HERE)
    spender = Spender(PARTNER, {HERE: 4 * EXPOSURE})
    ledger.credit(spender, 0.0)
    ledger.charge(spender, EXPOSURE + 1, 0.0)
    assert ledger.credit(spender, 0.0) == 0
    assert ledger.credit(spender, UNSIGNED_HALF_LIFE_S) > 0
    ledger.charge(spender, EXPOSURE, UNSIGNED_HALF_LIFE_S)
    assert ledger.credit(spender, UNSIGNED_HALF_LIFE_S) == 0
    assert ledger.sign(Tab(PARTNER, HERE, 2 * EXPOSURE), TAB, UNSIGNED_HALF_LIFE_S) == TAB
    assert ledger.credit(spender, UNSIGNED_HALF_LIFE_S) > 0


def test_the_largest_tab_is_kept():
    ledger, larger = Ledger(HERE), Signed(b"larger", b"", b"")
    assert ledger.sign(Tab(PARTNER, HERE, 5), TAB, 0.0) == TAB
    assert ledger.sign(Tab(PARTNER, HERE, 9), larger, 0.0) == larger
    assert ledger.sign(Tab(PARTNER, HERE, 7), TAB, 0.0) == larger


def test_a_flood_of_keys_costs_nobody_an_account():
    """Keys that cost nothing take no room from those with which service was exchanged."""
    ledger = Ledger(HERE, [VOUCHER])
    partner = Spender(PARTNER, {HERE: 50})
    assert ledger.credit(partner, 0.0) == 100
    ledger.charge(partner, 100, 0.0)
    for number in range(2 * MAX_OWNERS):
        ledger.credit(Spender(f"Key{number}", {f"Key{number + 1}": 10**12}), 0.0)
        ledger.sign(Tab(f"Key{number}", HERE, 10**12), TAB, 0.0)
    assert len(ledger.owners) <= MAX_OWNERS
    assert ledger.credit(partner, 0.0) == 0  # what it has spent is not forgotten
    late = Spender(STRANGER, {HERE: 50})
    assert ledger.credit(late, 0.0) == 50 * REPAID


def test_only_the_owner_signs(owner, other):
    tab = Tab(owner.peer_id, HERE, 5)
    assert read_claim(sign_claim(tab, owner.sign), Tab) == tab
    for forged in (
        sign_claim(tab, other.sign),
        msgspec.structs.replace(
            sign_claim(tab, owner.sign), statement=msgspec.msgpack.encode(Tab(owner.peer_id, HERE, 6))
        ),
        sign_claim(Grant(owner.peer_id, HERE, 5), owner.sign),  # another claim, of the same form
        Signed(b"\xc1", b"ssh-rsa AAAA", b"===="),
        Signed(msgspec.msgpack.encode(tab), b"", b""),
    ):
        with pytest.raises(ProtocolViolation):
            read_claim(forged, Tab)


def test_a_client_shows_what_is_its_own(owner, other):
    """Another client's grant, and tabs for other owners, end the stream; a grant that has expired is no crime."""

    def grant(**changes: Any) -> Signed:
        claim = msgspec.structs.replace(Grant(owner.peer_id, "Buyer", 100), **changes)
        return sign_claim(claim, owner.sign)

    good = sign_claim(Tab(other.peer_id, owner.peer_id, 7), other.sign)
    assert read_points(Points(grant(), (good,)), "Buyer", 99.0) == Spender(owner.peer_id, {other.peer_id: 7})
    assert read_points(Points(grant(), (good,)), "Buyer", 100.0) is None
    own = sign_claim(Tab(owner.peer_id, owner.peer_id, 7), owner.sign)
    others = sign_claim(Tab(owner.peer_id, other.peer_id, 7), owner.sign)
    for points in (Points(grant(spender="Another")), Points(grant(), (own,)), Points(grant(), (others,))):
        with pytest.raises(ProtocolViolation):
            read_points(points, "Buyer", 0.0)


def test_a_file_of_points(tmp_path: Path):
    path = tmp_path / "identity.points"
    assert read_owners(path) == {}
    ledger = Ledger(HERE)
    ledger.charge(Spender(PARTNER, {HERE: 10}), 30, 5.0)
    ledger.sign(Tab(PARTNER, HERE, 9), TAB, 5.0)
    path.write_bytes(encode_owners(ledger.owners))
    assert read_owners(path) == ledger.owners
    for damaged in (b"", b"\xc1", path.read_bytes()[:-1], b"\x80", msgspec.msgpack.encode({"type": "swarm points 2"})):
        path.write_bytes(damaged)
        with pytest.raises(PointsFileError, match="not a file of points"):
            read_owners(path)
    with pytest.raises(PointsFileError, match="cannot be read"):
        read_owners(tmp_path)
