"""Strangers, expired and revoked members at a private swarm of real processes, beside members that go on working.

At commit a254ca2 there was no private swarm: whoever had the address of one peer got all of `strangers.EVERYTHING`, as
it still does in an open swarm, and could not be shut out again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import uvloop

from swarm.client.threads.network_thread import NetworkThread
from swarm.data_structures import Span
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import MembershipError, SwarmError
from swarm.membership.invite import Invite
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.monitor.swarm_poller import DhtSource
from swarm.transport.members.gate import GREETING_PERIOD_S
from swarm.transport.p2p import P2PConfig, Peer
from tests.disturbances import demo_prompt, demo_text, write
from tests.members import TestAuthority
from tests.strangers import EVERYTHING, Served, ask_for_everything
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

NEW = 8

# The strangers' connections to their own daemons are left to the garbage collector by hivemind.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return demo_prompt()


@pytest.fixture(scope="module")
def expected(prompt: torch.Tensor) -> list[int]:
    return demo_text(prompt, NEW)


@pytest.fixture(scope="module")
def authority() -> TestAuthority:
    return TestAuthority()


@pytest.fixture(scope="module")
def swarm(authority: TestAuthority) -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, ("0:6", "6:12"), authority.invite("owner"), dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def bystander(swarm: TestSwarm, authority: TestAuthority) -> Iterator[Any]:
    """A member that writes before and after whatever happens."""
    with run_client(swarm, dtype="float32", membership=authority.invite("bystander").to_line()) as model:
        yield model


def served(swarm: TestSwarm, holder: str = "0:6") -> Served:
    checkpoint = open_checkpoint(DEMO_FOLDER)
    (server,) = swarm.holders(holder)
    start, end = map(int, holder.split(":"))
    return Served(
        server.addresses[0], checkpoint.name, Span(start, end), checkpoint.revision, checkpoint.config.hidden_size
    )


def seen(swarm: TestSwarm, invite: Invite | None) -> int:
    """How many servers a monitor with this invite sees. Raises as `Peer.create`."""

    async def look() -> int:
        source = DhtSource(swarm.addresses, (), invite)
        try:
            return sum(len(model.servers) for model in (await source.poll()).models)
        finally:
            await source.close()

    return uvloop.run(look())


def revoke(swarm: TestSwarm, authority: TestAuthority, invite: Invite) -> None:
    """As `swarm members revoke` does, by way of one peer."""

    async def hand_out() -> int:
        config = P2PConfig(swarm.addresses[:1], membership=authority.invite("authority", 600))
        peer = await Peer.create(config, AnnouncementValidator())
        try:
            return await peer.hand_out_revocations(authority.revoke(invite))
        finally:
            await peer.shutdown()

    assert uvloop.run(hand_out()) >= 1


def test_in_an_open_swarm_a_stranger_gets_everything() -> None:
    """So that the others show something: these requests are right, and are answered where nobody is shut out."""
    with run_swarm(DEMO_FOLDER, ("0:6",), dtype="float32") as swarm:
        assert uvloop.run(ask_for_everything(served(swarm))) == EVERYTHING


def test_members_have_everything(swarm, bystander, authority, prompt, expected):
    assert write(bystander, prompt, NEW) == expected
    assert torch.isfinite(bystander(prompt).logits).all()  # a forward without a session
    assert seen(swarm, authority.invite("monitor")) == 2
    joining = P2PConfig(swarm.addresses, membership=authority.invite("member"))
    assert "join" in uvloop.run(ask_for_everything(served(swarm), joining))


def test_a_stranger_with_the_address_gets_nothing(swarm, bystander, prompt, expected):
    for holder in ("0:6", "6:12"):
        assert uvloop.run(ask_for_everything(served(swarm, holder))) == frozenset()
    with pytest.raises(MembershipError, match="this swarm is private: ask"):
        seen(swarm, None)
    with pytest.raises(MembershipError, match="this swarm is private: ask"):
        swarm.client(membership="")
    assert write(bystander, prompt, NEW) == expected


def test_a_member_of_another_swarm_is_a_stranger(swarm, bystander, prompt, expected):
    invite = TestAuthority().invite("anna")
    joining = P2PConfig(swarm.addresses, membership=invite)
    assert uvloop.run(ask_for_everything(served(swarm), joining)) == frozenset()
    with pytest.raises(MembershipError, match="not signed by this swarm's authority"):
        seen(swarm, invite)
    assert write(bystander, prompt, NEW) == expected


def test_an_expired_member_is_shut_out(swarm, bystander, authority, prompt, expected):
    began = time.monotonic()
    with run_client(swarm, dtype="float32", membership=authority.invite("guest").to_line()) as guest:
        assert write(guest, prompt, NEW) == expected
    usual = time.monotonic() - began
    invite = authority.invite("guest", 10 + 5 * usual)  # long enough for the same again, however busy the machine is
    with run_client(swarm, dtype="float32", membership=invite.to_line(), wait_for_blocks=2.0) as guest:
        assert write(guest, prompt, NEW) == expected
        with guest.inference_session(max_length=prompt.shape[1] + NEW):
            guest.generate(prompt, max_new_tokens=1)
            assert time.time() < invite.certificate.expires

            def is_shut_out() -> bool:
                asked = time.time()
                try:
                    guest.generate(prompt, max_new_tokens=1)
                except SwarmError:
                    return True
                assert asked < invite.certificate.expires + GREETING_PERIOD_S
                return False

            wait_until(is_shut_out)
            assert time.time() > invite.certificate.expires
    with pytest.raises(MembershipError, match="membership of guest expired"):
        swarm.client(membership=invite.to_line())
    assert write(bystander, prompt, NEW) == expected


def test_a_revoked_member_is_shut_out_within_a_greeting_period(swarm, bystander, authority, prompt, expected):
    """Only one server is told; the session over both ends, and the member cannot come back, by any server."""
    invite = authority.invite("carl")
    network = NetworkThread()
    try:
        peer = network.run(Peer.create(P2PConfig(swarm.addresses, membership=invite), AnnouncementValidator()))
        try:
            revoke(swarm, authority, invite)
            until = time.monotonic() + GREETING_PERIOD_S
            for server in swarm.working():
                wait_until(lambda target=server.peer_id: is_refused(network, peer, target, until))
            got = network.run(ask_dht_as(peer, swarm.working()[0].peer_id))
            assert got == (False, False)
        finally:
            network.run(peer.shutdown())
    finally:
        network.close()
    with pytest.raises(MembershipError, match="membership of carl was revoked"):
        swarm.client(membership=invite.to_line())
    assert write(bystander, prompt, NEW) == expected


def is_refused(network: NetworkThread, peer: Peer, target: str, until: float) -> bool:
    """Whether a server refuses a revoked member. One that asks later than `until` must not be let in any more."""

    async def refused() -> bool:
        asked = time.monotonic()
        try:
            (await peer.open_stream(target)).close()
        except SwarmError as error:
            return "was revoked" in str(error)
        assert asked < until
        return False

    return network.run(refused())


async def ask_dht_as(peer: Peer, target: str) -> tuple[bool, bool]:
    """Whether the other one answers a ping, and a look-up."""
    from hivemind.p2p import PeerID

    protocol, called = peer.dht.protocol, PeerID.from_base58(target)
    is_answered = await protocol.call_ping(called)
    try:
        await protocol.call_find(called, [bytes(20)])
    except SwarmError:
        return is_answered, False
    return is_answered, True
