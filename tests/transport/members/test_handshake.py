"""The exchange that begins a private swarm's streams, between honest and hostile peers, in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    MembershipExpired,
    MembershipNotProven,
    MembershipRevoked,
    NotAMember,
    PeerLost,
    ProtocolViolation,
    RemoteError,
    UnknownAuthority,
)
from swarm.membership.membership import Membership
from swarm.protocol import messages
from swarm.transport.members.handshake import admit_dialer, prove_as_dialer
from tests.members import TestAuthority
from tests.memory_hub import stream_pair

AUTHORITY = TestAuthority()
PATIENCE_S = 20.0


def member(name: str = "anna", authority: TestAuthority = AUTHORITY, **options: Any) -> Membership:
    return Membership(authority.invite(name), **options)


async def meet(dialer: Membership, acceptor: Membership, seen_as: str = "dialer") -> tuple[Any, Any]:
    """What the handshake gives each side: the other's name, or the error."""
    ours, theirs = stream_pair(seen_as, "acceptor")

    async def run(handshake, stream, own_id, membership):
        try:
            async with asyncio.timeout(PATIENCE_S):
                return (await handshake(stream, own_id, membership)).name
        except RemoteError as error:
            stream.close()
            return type(error)

    return tuple(
        await asyncio.gather(
            run(prove_as_dialer, ours, "dialer", dialer), run(admit_dialer, theirs, "acceptor", acceptor)
        )
    )


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def test_two_members_know_each_other():
    assert run(meet(member("anna"), member("berta"))) == ("berta", "anna")


def test_one_invite_serves_several_peers():
    invite = AUTHORITY.invite("anna")
    assert run(meet(Membership(invite), Membership(invite))) == ("anna", "anna")


@pytest.mark.parametrize(
    ("dialer", "told", "seen"),
    [
        (lambda: member("anna", TestAuthority()), UnknownAuthority, UnknownAuthority),
        (lambda: Membership(AUTHORITY.invite("anna", lifetime_s=-1)), MembershipExpired, MembershipExpired),
    ],
    ids=["another swarm's", "expired"],
)
def test_a_dialer_is_told_why_it_is_refused(dialer, told, seen):
    assert run(meet(dialer(), member())) == (told, seen)


def test_a_dialer_refuses_an_acceptor_that_expired():
    expired = Membership(AUTHORITY.invite("berta", lifetime_s=-1))
    assert run(meet(member(), expired))[0] is MembershipExpired


def test_a_proof_for_another_peer_id_is_refused():
    """The dialer signs for the id that it believes to have; libp2p tells the acceptor another."""
    assert run(meet(member(), member(), seen_as="somebody else")) == (MembershipNotProven, MembershipNotProven)


@given(dialer=st.integers(0, 3), acceptor=st.integers(0, 3))
def test_both_have_the_newest_revocations_afterwards(dialer, acceptor):
    authority = TestAuthority(b"d" * 32)
    left, right = member("anna", authority), member("berta", authority)
    lists = [authority.revoke(authority.invite()) for _ in range(3)]
    for side, seen in ((left, dialer), (right, acceptor)):
        for data in lists[:seen]:
            side.learn(data)
    assert run(meet(left, right)) == ("berta", "anna")
    assert left.revocations.number == right.revocations.number == max(dialer, acceptor)


def test_whoever_has_not_heard_of_a_revocation_hears_of_it():
    authority = TestAuthority()
    anna, berta = member("anna", authority), member("berta", authority)
    newest = authority.revoke(anna.invite)
    berta.learn(newest)
    assert run(meet(anna, berta)) == (MembershipRevoked, MembershipRevoked)
    assert run(meet(berta, anna))[0] is MembershipRevoked
    newcomer = member("carl", authority)
    run(meet(newcomer, berta))
    assert run(meet(anna, newcomer)) == (MembershipRevoked, MembershipRevoked)


def test_a_dialer_that_brings_its_own_revocation_is_refused():
    authority = TestAuthority()
    anna, berta = member("anna", authority), member("berta", authority)
    anna.learn(authority.revoke(anna.invite))
    _left, right = run(meet(anna, berta))
    assert right is MembershipRevoked


class Recorder:
    """A stream that keeps what was said on it."""

    def __init__(self, stream, peer_id=None):
        self.stream, self.said = stream, []
        self.peer_id = peer_id or stream.peer_id

    async def send(self, message, payload=b""):
        self.said.append((message, bytes(payload)))
        await self.stream.send(message, payload)

    async def receive(self, max_payload=0):
        return await self.stream.receive(max_payload)


def test_a_strangers_stream_gets_a_nonce_and_a_refusal_and_nothing_else():
    async def scenario():
        ours, theirs = stream_pair("stranger", "acceptor")
        recorder = Recorder(theirs)
        task = asyncio.ensure_future(admit_dialer(recorder, "acceptor", member()))
        await ours.receive()
        await ours.send(messages.InfoRequest())
        refusal = messages.decode_handshake((await ours.receive()).header)
        with pytest.raises(ProtocolViolation):
            await task
        assert isinstance(refusal, messages.Refusal)
        assert [type(message) for message, _ in recorder.said] == [messages.MemberChallenge, messages.Refusal]

    run(scenario())


def test_proofs_that_were_recorded_are_of_no_use_again():
    async def scenario():
        ours, theirs = stream_pair("dialer", "acceptor")
        recorder, acceptor = Recorder(ours), member("berta")
        await asyncio.gather(prove_as_dialer(recorder, "dialer", member()), admit_dialer(theirs, "acceptor", acceptor))
        again, theirs = stream_pair("dialer", "acceptor")
        task = asyncio.ensure_future(admit_dialer(theirs, "acceptor", acceptor))
        await again.receive()
        for message, payload in recorder.said:
            await again.send(message, payload)
        with pytest.raises(MembershipNotProven):
            await task

    run(scenario())


def test_a_stranger_in_the_middle_gets_through_to_nobody():
    """A member dials a stranger, which dials another member and hands every message on in both directions."""

    async def scenario():
        anna, left = stream_pair("anna", "stranger")
        right, berta = stream_pair("stranger", "berta")

        async def hand_on(source, target):
            try:
                while True:
                    frame = await source.receive()
                    await target.send(messages.decode_handshake(frame.header), frame.payload)
            except RemoteError:
                target.close()

        middle = [asyncio.ensure_future(hand_on(left, right)), asyncio.ensure_future(hand_on(right, left))]
        results = await asyncio.gather(
            prove_as_dialer(anna, "anna", member("anna")),
            admit_dialer(berta, "berta", member("berta")),
            return_exceptions=True,
        )
        for task in middle:
            task.cancel()
        await asyncio.gather(*middle, return_exceptions=True)
        return [type(result) for result in results]

    assert run(scenario()) == [MembershipNotProven, MembershipNotProven]


@pytest.mark.parametrize(
    "message",
    [
        messages.MemberChallenge(b"n" * 32),
        messages.NewerRevocations(),
        messages.MemberProof(b"c", b"n" * 32, b"s" * 64, 0),
        messages.MemberProof(member().certificate, b"n" * 32, b"s" * 64, 2**31 - 1),
        messages.Refusal("cache_full", "x"),
        messages.StepReply,
    ],
    ids=lambda message: getattr(message, "__name__", type(message).__name__),
)
def test_whatever_a_dialer_says_instead_is_a_typed_error(message):
    async def scenario():
        ours, theirs = stream_pair("stranger", "acceptor")
        task = asyncio.ensure_future(admit_dialer(theirs, "acceptor", member()))
        await ours.receive()
        await ours.send(messages.CloseSession() if isinstance(message, type) else message)
        with pytest.raises((NotAMember, ProtocolViolation)):
            await task

    run(scenario())


def test_a_list_that_was_promised_must_be_a_list():
    async def scenario():
        authority = TestAuthority()
        anna, berta = member("anna", authority), member("berta", authority)
        anna.learn(authority.revoke())
        object.__setattr__(anna.revocations, "encoded", b"nonsense")
        ours, theirs = stream_pair("dialer", "acceptor")
        _, refused = await asyncio.gather(
            prove_as_dialer(ours, "dialer", anna), admit_dialer(theirs, "acceptor", berta), return_exceptions=True
        )
        assert isinstance(refused, ProtocolViolation)

    run(scenario())


def test_a_stream_that_ends_is_a_peer_lost():
    async def scenario():
        ours, theirs = stream_pair("dialer", "acceptor")
        ours.close()
        with pytest.raises(PeerLost):
            await admit_dialer(theirs, "acceptor", member())

    run(scenario())
