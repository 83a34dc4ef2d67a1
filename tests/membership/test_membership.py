from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import MembershipExpired, MembershipNotProven, MembershipRevoked, ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import Purpose
from swarm.membership.membership import Membership, Statement
from tests.members import TestAuthority

AUTHORITY = TestAuthority()
ANNA, BERTA = AUTHORITY.invite("anna"), AUTHORITY.invite("berta")

purposes = st.sampled_from(list(Purpose))
words = st.sampled_from(["Qm1", "Qm2", "Qm3"])
contents = st.binary(max_size=4)


def statement(certificate=ANNA.encoded_certificate, speaker="Qm1", listener="Qm2", nonces=(b"1", b"2"), content=b""):
    return Statement(speaker, listener, certificate, nonces, content)


def test_a_member_proves_that_it_is_one():
    made = statement()
    signature = Membership(ANNA).prove(Purpose.DIALER, made)
    assert Membership(BERTA).verify(Purpose.DIALER, made, signature).name == "anna"


@given(
    made=st.tuples(purposes, words, words, st.tuples(contents, contents), contents),
    shown=st.tuples(purposes, words, words, st.tuples(contents, contents), contents),
)
def test_a_proof_holds_for_exactly_what_was_said(made, shown):
    def as_statement(said):
        return Statement(said[1], said[2], ANNA.encoded_certificate, said[3], said[4])

    signature = Membership(ANNA).prove(made[0], as_statement(made))
    if made == shown:
        assert Membership(BERTA).verify(shown[0], as_statement(shown), signature).name == "anna"
    else:
        with pytest.raises(MembershipNotProven):
            Membership(BERTA).verify(shown[0], as_statement(shown), signature)


def test_the_certificate_alone_proves_nothing():
    with pytest.raises(MembershipNotProven, match="certificate of anna, but did not prove"):
        Membership(BERTA).verify(Purpose.DIALER, statement(), Membership(BERTA).prove(Purpose.DIALER, statement()))


def test_a_member_of_another_swarm_is_a_stranger():
    stranger = TestAuthority().invite("anna")
    made = statement(stranger.encoded_certificate)
    with pytest.raises(UnknownAuthority):
        Membership(BERTA).verify(Purpose.DIALER, made, Membership(stranger).prove(Purpose.DIALER, made))


def test_an_expired_member_is_refused_from_its_last_second_on():
    clock = [1000.0]
    invite = AUTHORITY.invite("anna", lifetime_s=10, now=1000.0)
    judge = Membership(BERTA, now=lambda: clock[0])
    assert judge.judge(invite.encoded_certificate).name == "anna"
    clock[0] = 1010.0
    with pytest.raises(MembershipExpired):
        judge.judge(invite.encoded_certificate)  # known already, which does not help it
    clock[0] = 1009.9
    assert judge.judge(invite.encoded_certificate).name == "anna"


def test_a_revoked_member_is_refused_at_once_and_for_good():
    authority = TestAuthority()
    anna, berta = authority.invite("anna"), authority.invite("berta")
    judge = Membership(berta)
    assert judge.judge(anna.encoded_certificate).name == "anna"
    older, newer = authority.revoke(), authority.revoke(anna)
    assert judge.learn(newer)
    with pytest.raises(MembershipRevoked):
        judge.judge(anna.encoded_certificate)
    assert not judge.learn(older), "an older list must not bring a member back"
    with pytest.raises(MembershipRevoked):
        judge.judge(anna.encoded_certificate)
    judge.require_own()


@given(order=st.permutations(range(5)))
def test_the_newest_list_wins_in_any_order(order):
    authority = TestAuthority(b"c" * 32)
    invites = [authority.invite(str(number)) for number in range(5)]
    lists = [authority.revoke(invite) for invite in invites]
    judge = Membership(authority.invite())
    for seen, which in enumerate(order):
        newest = max([-1, *order[:seen]])
        assert judge.learn(lists[which]) == (which > newest)
    assert judge.revocations.number == 5
    assert judge.revocations.revoked == {invite.certificate.serial for invite in invites}


@pytest.mark.parametrize("data", [b"", b"nonsense", TestAuthority().revoke(ANNA)])
def test_a_list_of_somebody_else_changes_nothing(data):
    judge = Membership(BERTA)
    with pytest.raises((ProtocolViolation, UnknownAuthority)):
        judge.learn(data)
    assert judge.revocations.number == 0
    assert judge.judge(ANNA.encoded_certificate).name == "anna"


def test_revocations_survive_a_restart(tmp_path):
    authority = TestAuthority()
    anna, berta = authority.invite("anna"), authority.invite("berta")
    store = tmp_path / "peer.key.revocations"
    Membership(berta, store).learn(authority.revoke(anna))
    again = Membership(berta, store)
    with pytest.raises(MembershipRevoked):
        again.judge(anna.encoded_certificate)
    assert list(tmp_path.iterdir()) == [store]


@pytest.mark.parametrize("content", [b"", b"nonsense", TestAuthority().revoke()])
def test_a_file_that_cannot_be_used_is_replaced_by_the_next_list(tmp_path, content):
    store = tmp_path / "peer.key.revocations"
    store.write_bytes(content)
    peer = Membership(ANNA, store)
    assert peer.revocations.number == 0
    newest = TestAuthority.revoke(AUTHORITY)
    assert peer.learn(newest)
    assert store.read_bytes() == newest
