from __future__ import annotations

import asyncio

import pytest

from swarm.errors import MembershipRevoked, NotAMember, PeerLost, PeerTimeout
from swarm.membership.membership import Membership
from swarm.protocol import messages
from swarm.transport.members import gate as module
from swarm.transport.members.gate import MAX_UNPROVEN_OF_PEER, MemberGate
from tests.members import TestAuthority
from tests.memory_hub import stream_pair

PATIENCE_S = 20.0


@pytest.fixture
def authority():
    return TestAuthority()


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


async def passed(left: MemberGate, right: MemberGate):
    ours, theirs = stream_pair("left", "right")
    await asyncio.gather(left.enter(ours), right.admit(theirs))
    return ours, theirs


def gates(authority):
    return (
        MemberGate(Membership(authority.invite("anna")), "left"),
        MemberGate(Membership(authority.invite("berta")), "right"),
    )


def test_what_members_say_afterwards_arrives(authority):
    async def scenario():
        ours, theirs = await passed(*gates(authority))
        await ours.send(messages.InfoRequest(), b"payload")
        frame = await theirs.receive()
        assert isinstance(messages.decode_client(frame.header), messages.InfoRequest)
        assert bytes(frame.payload) == b"payload"

    run(scenario())


def test_a_revocation_ends_streams_of_that_member_only(authority):
    async def scenario():
        left, right = gates(authority)
        carl = MemberGate(Membership(authority.invite("carl")), "left")
        of_anna, of_carl = await passed(left, right), await passed(carl, right)
        right.membership.learn(authority.revoke(left.membership.invite))
        right.end_invalid_streams()
        with pytest.raises(PeerLost):
            await of_anna[0].receive()
        await of_carl[1].send(messages.InfoRequest())
        await of_carl[0].receive()

    run(scenario())


def test_an_invite_that_expires_ends_its_streams(authority):
    async def scenario():
        now = [1000.0]
        anna, berta = authority.invite("anna", 10, now=1000.0), authority.invite("berta", 1000, now=1000.0)
        left, right = (
            MemberGate(Membership(invite, now=lambda: now[0]), name)
            for invite, name in ((anna, "left"), (berta, "right"))
        )
        ours, theirs = await passed(left, right)
        right.end_invalid_streams()
        await ours.send(messages.InfoRequest())
        await theirs.receive()
        now[0] = 1010.0
        right.end_invalid_streams()
        with pytest.raises(PeerLost):
            await ours.receive()

    run(scenario())


def test_news_is_said_where_a_list_was_learnt(authority):
    async def scenario():
        left, right = gates(authority)
        await passed(left, right)
        assert not left.news.is_set()
        assert not right.news.is_set()
        left.membership.learn(authority.revoke())
        await passed(left, right)
        assert right.news.is_set()

    run(scenario())


def test_a_peer_that_says_nothing_is_given_up(authority, monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def scenario():
        left, right = gates(authority)
        _ours, theirs = stream_pair("left", "right")
        with pytest.raises(PeerTimeout):
            await right.admit(theirs)
        with pytest.raises(PeerTimeout):
            await left.enter(stream_pair("left", "right")[0])
        assert not right._unproven

    run(scenario())


def test_streams_without_a_proof_are_few(authority):
    async def scenario():
        _, right = gates(authority)
        pairs = [stream_pair("stranger", "right") for _ in range(MAX_UNPROVEN_OF_PEER)]
        waiting = [asyncio.ensure_future(right.admit(theirs)) for _, theirs in pairs]
        for ours, _ in pairs:
            await ours.receive()
        one_more = stream_pair("stranger", "right")
        with pytest.raises(PeerLost, match="too many streams"):
            await right.admit(one_more[1])
        honest, theirs = stream_pair("left", "right")
        await asyncio.gather(gates(authority)[0].enter(honest), right.admit(theirs))
        for ours, _ in pairs:
            ours.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(result) for result in results} == {PeerLost}
        assert not right._unproven

    run(scenario())


class Crowd:
    """Streams of strangers, which prove nothing."""

    def __init__(self, gate: MemberGate) -> None:
        self.gate = gate
        self.streams: list = []
        self.waiting: list = []

    async def come(self, *names: str) -> None:
        for name in names:
            ours, theirs = stream_pair(name, "right")
            self.streams.append(ours)
            self.waiting.append(asyncio.ensure_future(self.gate.admit(theirs)))
            await ours.receive()  # the challenge

    async def leave(self) -> None:
        for ours in self.streams:
            ours.close()
        results = await asyncio.gather(*self.waiting, return_exceptions=True)
        assert {type(result) for result in results} <= {PeerLost}
        assert not self.gate._unproven


@pytest.mark.parametrize("has_proven", [True, False], ids=["who has proven before", "a peer that has just started"])
def test_a_crowd_of_strangers_does_not_shut_out_members(authority, monkeypatch, has_proven):
    monkeypatch.setattr(module, "MAX_UNPROVEN", 3)

    async def scenario():
        left, right = gates(authority)
        if has_proven:
            await passed(left, right)
        crowd = Crowd(right)
        await crowd.come("one", "other", "third")
        await passed(left, right)
        await crowd.come("fourth", "fifth", "sixth")
        assert len(right._unproven) == 3
        await passed(left, right)
        await crowd.leave()

    run(scenario())


def test_whoever_has_most_streams_without_a_proof_loses_the_oldest(authority, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNPROVEN", 6)

    async def scenario():
        left, right = gates(authority)
        crowd = Crowd(right)
        await crowd.come("one", "other", "one")
        ours, theirs = stream_pair("left", "right")  # a member that takes its time
        slow = asyncio.ensure_future(right.admit(theirs))
        await crowd.come("other", "one", "other", "one", "other", "one", "third")
        assert {peer: len(streams) for peer, streams in right._unproven.items()} == {
            "one": 2,
            "other": 2,
            "left": 1,
            "third": 1,
        }
        with pytest.raises(PeerLost):
            await crowd.waiting[0]
        await left.enter(ours)
        await slow
        await crowd.leave()

    run(scenario())


def test_a_stranger_of_the_open_protocol_is_told_that_the_swarm_is_private(authority):
    async def scenario():
        _, right = gates(authority)
        ours, theirs = stream_pair("stranger", "right")
        await ours.send(messages.InfoRequest())
        refusing = asyncio.ensure_future(right.refuse_stranger(theirs))
        refusal = messages.decode_server((await ours.receive()).header)
        ours.close()
        await refusing
        assert isinstance(refusal, messages.Refusal)
        assert refusal.code == NotAMember.code
        assert "this swarm is private: ask" in refusal.message

    run(scenario())


def test_a_revoked_dialer_can_read_why(authority):
    async def scenario():
        left, right = gates(authority)
        right.membership.learn(authority.revoke(left.membership.invite))
        ours, theirs = stream_pair("left", "right")
        admitting = asyncio.ensure_future(right.admit(theirs))
        with pytest.raises(MembershipRevoked, match="membership of anna was revoked"):
            await left.enter(ours)
        ours.close()
        with pytest.raises(MembershipRevoked):
            await admitting

    run(scenario())
