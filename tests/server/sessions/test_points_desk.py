"""Sessions with points: whose they are, what their owner is charged, and the tabs that it signs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from swarm.protocol import messages
from swarm.server.sessions.points_desk import SAVE_PERIOD_S, PointsDesk
from swarm.transport.identity import Identity, load_or_create
from swarm.trust.points import CONTRIBUTOR_WEIGHT, REPAID, Grant, Ledger, Tab, read_owners, sign_claim
from tests.server.conversations import OPEN, SPAN, Server, changed, make_model, with_server

BUYER = "Buyer"
FAR = 2**40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("points"))


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("points") / "owner")


def points(owner: Identity, *tabs: messages.Signed, spender: str = BUYER) -> messages.Points:
    return messages.Points(sign_claim(Grant(owner.peer_id, spender, FAR), owner.sign), tabs)


def tab(owner: Identity, total: int, holder: str = "server") -> messages.Signed:
    return sign_claim(Tab(owner.peer_id, holder, total), owner.sign)


def ledger(server: Server) -> Ledger:
    return server.handler._points._ledger


@with_server()
async def test_points_are_spent_and_signed_for(server, owner):
    """The session of an owner that is worth something counts more; it is charged as it goes, and when it ends."""
    known = ledger(server)._open(owner.peer_id, 1)
    assert known is not None
    known.given = 8 // REPAID
    client = await server.client(BUYER)
    await client.begin(changed(OPEN, points=points(owner)))
    session = server.session(BUYER)
    assert session.terms.weight == CONTRIBUTOR_WEIGHT
    assert known.spent == 0
    signed = tab(owner, 2 * SPAN.length)
    reply, _ = await client.ask(messages.SignedTab(signed))
    assert reply == messages.TabKept(signed)
    assert (known.spent, known.served, round(known.unsigned)) == (6, 6, 0)
    await client.right_step(3)
    client.stream.close()
    server.sessions.close(session)
    assert (known.spent, known.served, round(known.unsigned)) == (8, 15, 9)
    again = await server.client(BUYER)
    opened, _ = await again.ask(changed(OPEN, points=points(owner)))
    assert opened == messages.SessionOpened(0, signed)
    assert server.session(BUYER).terms.weight == 1.0


@with_server()
async def test_without_points_all_is_as_ever(server, owner):
    client = await server.client(BUYER)
    await client.begin()
    assert server.session(BUYER).terms.weight == 1.0
    server.sessions.close(server.session(BUYER))
    assert ledger(server).owners == {}


@with_server()
async def test_what_is_not_signed_for_this_client_ends_the_stream(server, owner):
    forged = points(owner)
    forged = msgspec.structs.replace(forged, grant=msgspec.structs.replace(forged.grant, signature=b"AAAA"))
    for wrong in (forged, points(owner, spender="Another"), points(owner, tab(owner, 5))):
        client = await server.client(BUYER)
        await client.refused("protocol_violation", changed(OPEN, points=wrong))
        await client.is_over()
    unknown = await (await server.client(BUYER)).begin()
    assert await unknown.ask(messages.SignedTab(tab(owner, 5))) == (messages.TabKept(None), b"")
    assert ledger(server).owners == {}
    other = load_or_create(owner.path.with_name("other"))
    for number, wrong_tab in enumerate((tab(owner, 5, holder="Another"), tab(other, 5))):
        client = await server.client(BUYER)
        session_id = bytes([number] * 16)
        await client.begin(changed(OPEN, session_id=session_id, points=points(owner), max_length=4))
        await client.refused("protocol_violation", messages.SignedTab(wrong_tab))
        await client.is_over()
    assert not any(one.signed for one in ledger(server).owners.values())


@with_server()
async def test_tabs_need_a_session(server, owner):
    await (await server.client(BUYER)).refused("unknown_session", messages.SignedTab(tab(owner, 5)))


@with_server()
async def test_accounts_are_saved_now_and_then_and_at_the_end(server, owner, tmp_path: Path):
    now, path = [1000.0], tmp_path / "identity.points"
    desk = PointsDesk("server", path, now=lambda: now[0])
    client = await (await server.client(BUYER)).begin(changed(OPEN, points=points(owner)))
    await desk.keep(server.session(BUYER), tab(owner, 5))
    await desk.save()
    assert not path.exists()
    now[0] += SAVE_PERIOD_S
    await desk.save()
    assert read_owners(path)[owner.peer_id].signed == 5
    signed = tab(owner, 9)
    assert await desk.keep(server.session(BUYER), signed) == signed
    await desk.close()
    assert read_owners(path)[owner.peer_id].signed == 9
    assert PointsDesk("server", path)._ledger.account(owner.peer_id).tab == signed
    lost = PointsDesk("server", tmp_path / "no folder" / "identity.points", now=lambda: now[0])
    await lost.keep(server.session(BUYER), tab(owner, 9))
    await lost.close()  # it says so in the log
    client.stream.close()
