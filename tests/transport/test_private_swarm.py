"""Peers of private and of open swarms meet, over real libp2p daemons on loopback."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import uvloop
from hivemind.p2p import PeerID
from multiaddr import Multiaddr

from swarm.dht.probe import probe, read_record, write_record
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import DhtError, MembershipError, MembershipNotProven, NotAMember, PeerLost
from swarm.membership.invite import Invite
from swarm.protocol import messages
from swarm.transport.dht.records import sign
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.reach.circuit import ask_for_place
from tests.members import TestAuthority

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Where sockets lie: a short path."""
    path = Path(tempfile.mkdtemp(prefix="swp-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def authority():
    return TestAuthority()


class Peers:
    """Peers of one test, which are shut down at its end."""

    def __init__(self) -> None:
        self._started: list[Peer] = []

    async def start(self, invite: Invite | None, *known: Peer, listen: bool = True, **options) -> Peer:
        addresses = [address for peer in known for address in await peer.visible_addresses()]
        config = P2PConfig(tuple(addresses), LOOPBACK if listen else (), membership=invite, **options)
        self._started.append(await Peer.create(config, AnnouncementValidator()))
        return self._started[-1]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        for peer in reversed(self._started):
            await peer.shutdown()


def run(scenario):
    async def limited():
        async with asyncio.timeout(PATIENCE_S), Peers() as peers:
            return await scenario(peers)

    return uvloop.run(limited())


async def echo(stream) -> None:
    while True:
        frame = await stream.receive()
        await stream.send(messages.Refusal("echo", "x"), frame.payload)


async def ask(peer: Peer, target: str, payload: bytes = b"hello") -> bytes:
    stream = await peer.open_stream(target)
    try:
        await stream.send(messages.InfoRequest(), payload)
        return bytes((await stream.receive()).payload)
    finally:
        stream.close()


async def visit(stranger: Peer, target: Peer) -> None:
    """Connect without joining."""
    (address,) = await target.visible_addresses()
    where = Multiaddr(address.rpartition("/p2p/")[0])
    await stranger.dht.p2p._client.connect(PeerID.from_base58(target.peer_id), [where])


def test_members_have_everything(authority):
    async def scenario(peers):
        first = await peers.start(authority.invite("first"))
        server = await peers.start(authority.invite("server"), first)
        client = await peers.start(authority.invite("client"), first, listen=False)
        await server.serve(echo)
        assert await ask(client, server.peer_id, b"x" * 100_000) == b"x" * 100_000
        assert await write_record(client)
        assert await read_record(client)

    run(scenario)


def test_whoever_has_no_invite_is_told_to_ask_for_one(authority):
    async def scenario(peers):
        first = await peers.start(authority.invite("first"))
        with pytest.raises(MembershipError, match="this swarm is private: ask the person who runs it for an invite"):
            await peers.start(None, first, listen=False)
        with pytest.raises(MembershipError, match="was not signed by this swarm's authority"):
            await peers.start(TestAuthority().invite(), first)

    run(scenario)


def test_an_invite_is_of_no_use_in_an_open_swarm(authority):
    async def scenario(peers):
        first = await peers.start(None)
        with pytest.raises(MembershipError, match="leave the membership out to join an open swarm"):
            await peers.start(authority.invite("anna"), first)

    run(scenario)


def test_invites_that_do_not_hold_are_refused_and_say_why(authority):
    async def scenario(peers):
        with pytest.raises(MembershipError, match=r"membership of anna expired .* ago"):
            await peers.start(authority.invite("anna", lifetime_s=-1))
        berta = authority.invite("berta")
        first = await peers.start(authority.invite("first"))
        await first.hand_out_revocations(authority.revoke(berta))
        with pytest.raises(MembershipError, match="membership of berta was revoked"):
            await peers.start(berta, first)

    run(scenario)


def test_a_stranger_who_is_connected_gets_nothing(authority):
    """It speaks libp2p to a member, and asks all that there is to ask."""

    async def scenario(peers):
        first = await peers.start(authority.invite("first"))
        await first.serve(echo)
        member = await peers.start(authority.invite("anna"), first)
        assert await write_record(member)
        for invite in (None, TestAuthority().invite("anna")):
            stranger = await peers.start(invite)
            await visit(stranger, first)
            target, protocol = PeerID.from_base58(first.peer_id), stranger.dht.protocol
            assert not await protocol.call_ping(target)
            assert len(first.dht.protocol.store) == 1
            with pytest.raises((DhtError, NotAMember)):
                await protocol.call_find(target, [bytes(20)])
            record = sign("key", b"payload", time.time() + 60, stranger.identity.private_key)
            with pytest.raises((DhtError, NotAMember)):
                await protocol.call_store(target, [record])
            assert len(first.dht.protocol.store) == 1
            assert stranger.peer_id not in first.dht.known_peers
            with pytest.raises(PeerLost, match="no other answer" if invite is None else "cannot be used"):
                await ask_raw(stranger, first.peer_id)
            (address,) = await first.visible_addresses()
            with pytest.raises(PeerLost, match="private" if invite is None else "authority"):
                await probe(stranger, address, 20.0)

    async def ask_raw(stranger, target):
        stream = await stranger.open_stream(target)
        await stream.send(messages.InfoRequest())
        refusal = messages.decode_server((await stream.receive()).header)
        assert isinstance(refusal, messages.Refusal)
        assert refusal.code == NotAMember.code
        with pytest.raises(PeerLost):
            await stream.receive()
        raise PeerLost("no other answer")

    run(scenario)


def test_a_revocation_reaches_all_and_ends_what_is_open(authority):
    async def scenario(peers):
        anna, berta = authority.invite("anna"), authority.invite("berta")
        first = await peers.start(authority.invite("first"))
        servers = [await peers.start(authority.invite(f"s{number}"), first) for number in range(2)]
        for server in servers:
            await server.serve(echo)
        revoked = await peers.start(anna, first, listen=False)
        bystander = await peers.start(berta, first, listen=False)
        streams = [await revoked.open_stream(server.peer_id) for server in servers]
        for stream in streams:
            await stream.send(messages.InfoRequest())
            await stream.receive()
        publisher = await peers.start(authority.invite("authority"), first, listen=False)
        assert await publisher.hand_out_revocations(authority.revoke(anna)) >= 1
        for stream in streams:
            with pytest.raises(PeerLost):
                await stream.receive()
        for server in servers:
            with pytest.raises(PeerLost, match="membership of anna was revoked"):
                await ask(revoked, server.peer_id)
            assert await ask(bystander, server.peer_id) == b"hello"

    run(scenario)


def test_revocations_are_kept_beside_the_identity(authority, tmp_path):
    async def scenario(peers):
        anna = authority.invite("anna")
        first = await peers.start(authority.invite("first"), identity_path=tmp_path / "peer.key")
        await first.hand_out_revocations(authority.revoke(anna))
        await first.shutdown()
        again = await peers.start(authority.invite("first"), identity_path=tmp_path / "peer.key")
        with pytest.raises(MembershipError, match="membership of anna was revoked"):
            await peers.start(anna, again)

    run(scenario)


def test_who_relays_for_whom(authority):
    async def scenario(peers):
        invite = authority.invite()
        private, open_one = await peers.start(authority.invite()), await peers.start(None)
        stranger, member = await peers.start(None), await peers.start(invite)
        for peer in (stranger, member):
            for relay in (private, open_one):
                await visit(peer, relay)
        for peer in (stranger, member):
            assert await ask_for_place(peer.dht.p2p, PeerID.from_base58(open_one.peer_id), 5.0) > 600
            with pytest.raises(MembershipNotProven):
                await ask_for_place(peer.dht.p2p, PeerID.from_base58(private.peer_id), 5.0)
        (await member.open_stream(private.peer_id)).close()
        assert await ask_for_place(member.dht.p2p, PeerID.from_base58(private.peer_id), 5.0) > 600
        await private.hand_out_revocations(authority.revoke(invite))
        with pytest.raises(MembershipNotProven):
            await ask_for_place(member.dht.p2p, PeerID.from_base58(private.peer_id), 5.0)

    run(scenario)
