"""The lock on requests and responses of the DHT, with hivemind's own messages."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    MembershipExpired,
    MembershipNotProven,
    MembershipRevoked,
    NotAMember,
    ProtocolViolation,
    UnknownAuthority,
)
from swarm.membership.membership import Membership
from swarm.transport.members.dht_lock import MAX_AGE_S, DhtLock
from tests.members import TestAuthority

AUTHORITY = TestAuthority()
ANNA, BERTA = Membership(AUTHORITY.invite("anna")), Membership(AUTHORITY.invite("berta"))
PEERS = [PeerID(bytes([0x12, 0x20]) + bytes([number]) * 32) for number in range(3)]

requests = st.one_of(
    st.builds(
        dht_pb2.FindRequest,
        keys=st.lists(st.binary(max_size=40), max_size=4),
        peer=st.builds(dht_pb2.NodeInfo, node_id=st.binary(max_size=20)),
    ),
    st.builds(dht_pb2.PingRequest, validate=st.booleans()),
    st.builds(
        dht_pb2.StoreRequest,
        keys=st.lists(st.binary(max_size=40), max_size=4),
        values=st.lists(st.binary(max_size=40), max_size=4),
        in_cache=st.lists(st.booleans(), max_size=4),
    ),
)


def copied(message):
    """As it arrives on the other side."""
    return type(message).FromString(message.SerializeToString())


def example():
    return dht_pb2.FindRequest(keys=[b"k" * 20])


@given(request=requests)
def test_a_members_request_opens_and_is_as_it_was(request):
    before = request.SerializeToString()
    nonce = DhtLock(ANNA).sign_request(request, "a", "b")
    arrived = copied(request)
    assert DhtLock(BERTA).open_request(arrived, "a", "b") == nonce
    assert arrived.SerializeToString() == before


@given(request=requests, position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_no_changed_byte_passes(request, position, change):
    DhtLock(ANNA).sign_request(request, "a", "b")
    signed = request.SerializeToString()
    data = bytearray(signed)
    data[position % len(data)] ^= change
    try:
        arrived = type(request).FromString(bytes(data))
    except DecodeError:
        return
    if arrived.SerializeToString() == signed:
        return  # another encoding of the same message
    with pytest.raises((NotAMember, ProtocolViolation)):
        DhtLock(BERTA).open_request(arrived, "a", "b")


def test_a_request_is_for_one_peer_by_one_peer():
    for caller, called in [("a", "c"), ("c", "b"), ("b", "a")]:
        request = example()
        DhtLock(ANNA).sign_request(request, "a", "b")
        with pytest.raises(MembershipNotProven):
            DhtLock(BERTA).open_request(request, caller, called)


def test_a_request_of_one_kind_is_none_of_another():
    """A ping without content and a find without keys look alike on the wire."""
    ping = dht_pb2.PingRequest()
    DhtLock(ANNA).sign_request(ping, "a", "b")
    with pytest.raises(MembershipNotProven):
        DhtLock(BERTA).open_request(dht_pb2.FindRequest.FromString(ping.SerializeToString()), "a", "b")


def test_an_old_request_is_refused():
    for late_s in [-MAX_AGE_S - 1, MAX_AGE_S + 1, -1e300, float("nan")]:
        request = example()
        DhtLock(ANNA, now=lambda: 1000.0).sign_request(request, "a", "b")
        lock = DhtLock(BERTA, now=lambda late_s=late_s: 1000.0 + late_s)
        with pytest.raises(MembershipNotProven, match="old, or the clocks"):
            lock.open_request(request, "a", "b")


def test_strangers_expired_and_revoked_members_are_told_apart():
    authority = TestAuthority()
    anna, judge = authority.invite("anna"), Membership(authority.invite("berta"))
    cases = [
        (Membership(TestAuthority().invite()), UnknownAuthority),
        (Membership(authority.invite(lifetime_s=-1)), MembershipExpired),
        (Membership(anna), MembershipRevoked),
    ]
    judge.learn(authority.revoke(anna))
    for caller, expected in cases:
        request = example()
        DhtLock(caller).sign_request(request, "a", "b")
        with pytest.raises(expected):
            DhtLock(judge).open_request(request, "a", "b")
    with pytest.raises(NotAMember, match="this swarm is private: ask"):
        DhtLock(judge).open_request(example(), "a", "b")


def call(asked: DhtLock, answers: DhtLock, handler, caller=PEERS[0], called=PEERS[1], seen=None):
    """A request through both locks, as the daemon carries it. `seen`: the caller as the called peer sees it."""
    guarded = answers.guard(handler)
    request = example()

    async def carry():
        context = SimpleNamespace(remote_id=seen or caller, local_id=called)
        return copied(await guarded(copied(request), context))

    return asyncio.run(asked.call(carry, request, caller, called))


async def answer(request, context):
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=key) for key in request.keys])


def test_members_answer_each_other():
    response = call(DhtLock(ANNA), DhtLock(BERTA), answer)
    assert [result.value for result in response.results] == [b"k" * 20]


def test_a_strangers_handler_is_not_reached():
    async def never(request, context):
        raise AssertionError("reached")

    with pytest.raises(UnknownAuthority):
        call(DhtLock(Membership(TestAuthority().invite())), DhtLock(BERTA), never)


def test_a_strangers_answer_is_not_believed():
    stranger = DhtLock(Membership(TestAuthority().invite()))

    async def carry():
        response = await answer(example(), None)
        stranger.sign_response(response, PEERS[1].to_base58(), PEERS[0].to_base58(), b"n" * 32)
        return response

    with pytest.raises(UnknownAuthority):
        asyncio.run(DhtLock(ANNA).call(carry, example(), PEERS[0], PEERS[1]))

    async def carry_unsigned():
        return await answer(example(), None)

    with pytest.raises(NotAMember, match="shows no membership"):
        asyncio.run(DhtLock(ANNA).call(carry_unsigned, example(), PEERS[0], PEERS[1]))


def test_a_stranger_in_the_middle_can_hand_nothing_on():
    """A member calls a stranger, which sends the signed request on to another member in its own name."""
    with pytest.raises(MembershipNotProven):
        call(DhtLock(ANNA), DhtLock(BERTA), answer, called=PEERS[1], seen=PEERS[2])

    request = example()
    DhtLock(ANNA).sign_request(request, PEERS[0].to_base58(), PEERS[2].to_base58())
    context = SimpleNamespace(remote_id=PEERS[2], local_id=PEERS[1])
    with pytest.raises(MembershipNotProven):
        asyncio.run(DhtLock(BERTA).guard(answer)(request, context))


@given(position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_an_answer_to_another_request_is_not_believed(position, change):
    request, response = example(), dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=b"v")])
    nonce = DhtLock(ANNA).sign_request(request, "a", "b")
    DhtLock(BERTA).sign_response(response, "b", "a", nonce)
    DhtLock(ANNA).open_response(copied(response), "b", "a", nonce)
    other = bytearray(nonce)
    other[position % len(other)] ^= change
    with pytest.raises(MembershipNotProven):
        DhtLock(ANNA).open_response(copied(response), "b", "a", bytes(other))
