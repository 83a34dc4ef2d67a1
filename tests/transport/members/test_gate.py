from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    MembershipError,
    MembershipExpired,
    MembershipNotProven,
    MembershipRevoked,
    NotAMember,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    UnknownAuthority,
)
from swarm.membership.membership import Membership
from swarm.protocol import messages
from swarm.transport.members import gate as module
from swarm.transport.members.gate import (
    MAX_UNPROVEN_OF_PEER,
    Greetings,
    MemberGate,
    admit_dialer,
    greet_all,
    prove_as_dialer,
    require_welcome,
)
from tests.members import TestAuthority
from tests.memory_hub import MemoryHub, MemoryNetwork, stream_pair

PATIENCE_S = 30.0


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


AUTHORITY = TestAuthority()


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


def test_a_revocation_is_passed_on_in_the_handshake():
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


def test_whatever_a_dialer_says_instead_is_a_typed_error():
    async def scenario():
        for message in (
            messages.MemberChallenge(b"n" * 32),
            messages.MemberProof(b"c", b"n" * 32, b"s" * 64, 0),
            messages.MemberProof(member().certificate, b"n" * 32, b"s" * 64, 2**31 - 1),
            messages.Refusal("cache_full", "x"),
            messages.CloseSession(),
        ):
            ours, theirs = stream_pair("stranger", "acceptor")
            task = asyncio.ensure_future(admit_dialer(theirs, "acceptor", member()))
            await ours.receive()
            await ours.send(message)
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


class Node:
    """A member in memory that greets its neighbors."""

    def __init__(self, hub: MemoryHub, name: str, membership: Membership, neighbors: list[str]) -> None:
        self.network = MemoryNetwork(hub, name)
        self.gate = MemberGate(membership, name)
        self.greetings = Greetings(self.gate, self.greet, lambda: neighbors)

    async def greet(self, peer_id: str) -> None:
        stream = await self.network.open_stream(peer_id)
        try:
            await self.gate.enter(stream)
        finally:
            stream.close()


def test_a_revocation_reaches_everybody_whoever_was_told(monkeypatch):
    """Each knows a few others only, and nobody waits for a period."""
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 3600.0)
    authority, count = TestAuthority(), 12

    async def scenario():
        hub = MemoryHub()
        nodes = []
        for number in range(count):
            neighbors = [(number + 1) % count, (number + 2) % count]
            membership = Membership(authority.invite(f"m{number}"))
            nodes.append(Node(hub, f"p{number}", membership, [f"p{one}" for one in neighbors]))
        for node in nodes:
            await node.network.serve(node.gate.admit)
        tasks = [asyncio.ensure_future(node.greetings.run()) for node in nodes]
        told = nodes[5]
        told.gate.membership.learn(authority.revoke(authority.invite("stranger")))
        told.gate.news.set()
        while any(node.gate.membership.revocations.number < 1 for node in nodes):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_peer_that_was_missed_learns_it_in_the_next_period(monkeypatch):
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 0.05)
    authority = TestAuthority()

    async def scenario():
        hub = MemoryHub()
        quiet = Node(hub, "quiet", Membership(authority.invite("quiet")), [])
        asking = Node(hub, "asking", Membership(authority.invite("asking")), ["quiet"])
        quiet.gate.membership.learn(authority.revoke())
        await quiet.network.serve(quiet.gate.admit)
        task = asyncio.ensure_future(asking.greetings.run())
        while asking.gate.membership.revocations.number < 1:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_peer_that_was_revoked_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 0.01)
    authority = TestAuthority()

    async def scenario():
        invite = authority.invite("anna")
        gate = MemberGate(Membership(invite), "anna")
        gate.membership.learn(authority.revoke(invite))
        rounds = []

        def neighbors():
            rounds.append(None)
            return []

        async def greet(peer_id):
            raise AssertionError("there is nobody")

        task = asyncio.ensure_future(Greetings(gate, greet, neighbors).run())
        while len(rounds) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    logging.getLogger("swarm").propagate = True
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    said = [line for line in caplog.messages if "not a member of the swarm any more" in line]
    assert len(said) == 1
    assert "membership of anna was revoked" in said[0]


def test_one_greeting_that_fails_does_not_stop_the_others():
    async def greet(peer_id):
        if peer_id == "gone":
            raise PeerLost("gone")

    results = asyncio.run(greet_all(["gone", "here", "here"], greet))
    assert results["here"] is None
    assert isinstance(results["gone"], PeerLost)


def test_one_welcome_is_enough_and_a_refusal_says_why():
    lost, refused = PeerLost("lost"), MembershipRevoked("the membership of anna was revoked")
    require_welcome({})
    require_welcome({"a": lost})
    require_welcome({"a": refused, "b": None})
    with pytest.raises(MembershipError, match="membership of anna was revoked"):
        require_welcome({"a": refused, "b": lost})
    with pytest.raises(MembershipError, match="open swarm"):
        require_welcome({"a": NotAMember("it is of an open swarm")})
