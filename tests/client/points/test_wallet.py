"""What a client shows of its owner's points, and how several clients of one owner sign for one server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.client.points.wallet import REREAD_S, Wallet
from swarm.errors import IdentityError, ProtocolViolation
from swarm.protocol.messages import MAX_SHOWN_TABS, Signed
from swarm.transport.identity import Identity, load_or_create
from swarm.trust.points import (
    GRANT_S,
    Grant,
    Ledger,
    Owner,
    Tab,
    encode_owners,
    points_path,
    read_claim,
    read_points,
    sign_claim,
)

SERVER = "Server"


@pytest.fixture
def identity(tmp_path) -> Identity:
    return load_or_create(tmp_path / "identity")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def test_the_right_to_spend_and_the_largest_tabs_are_shown(identity, tmp_path):
    async def scenario() -> None:
        clock = Clock()
        wallet = Wallet(identity.path, clock)
        points = await wallet.points_for(SERVER, "Buyer")
        assert points.tabs == ()
        spender = read_points(points, "Buyer", clock.now)
        assert spender is not None
        assert spender.owner == identity.peer_id
        assert await wallet.points_for("Another", "Buyer") == points
        debtors = [load_or_create(tmp_path / f"debtor{number}") for number in range(MAX_SHOWN_TABS + 1)]
        owners = {
            debtor.peer_id: Owner(
                served=total,
                signed=10**9 - total,
                tab=sign_claim(Tab(debtor.peer_id, identity.peer_id, total), debtor.sign),
            )
            for total, debtor in enumerate(debtors, 1)
        }
        points_path(identity.path).write_bytes(encode_owners(owners))
        clock.now += REREAD_S
        least = debtors[0].peer_id
        for server, shown in ((SERVER, debtors[1:]), (least, [debtors[0], *debtors[2:]])):
            points = await wallet.points_for(server, "Buyer")
            spender = read_points(points, "Buyer", clock.now)
            assert spender is not None
            assert set(spender.tabs) == {one.peer_id for one in shown}
        clock.now += 0.6 * GRANT_S
        points = await wallet.points_for(SERVER, "Buyer")
        assert read_claim(points.grant, Grant).until > clock.now + 0.9 * GRANT_S
        points_path(identity.path).write_bytes(b"damaged")
        clock.now += REREAD_S
        assert await wallet.points_for(SERVER, "Buyer") == points  # what it knew before

    asyncio.run(scenario())


def test_clients_of_one_owner_sign_one_after_the_other(identity):
    """Two clients that have seen the same tab end with a tab over what both have had."""

    async def scenario() -> None:
        ledger = Ledger(SERVER)

        async def send(signed: Signed) -> Signed | None:
            newest = ledger.sign(read_claim(signed, Tab), signed, 0.0)
            await asyncio.sleep(0)
            return newest

        wallets = [Wallet(identity.path) for _ in range(2)]
        for wallet in wallets:
            wallet.note_tab(SERVER, None)
        await asyncio.gather(*(wallet.sign(SERVER, 10, send) for wallet in wallets for _ in range(3)))
        assert ledger.owners[identity.peer_id].signed == 60
        await wallets[0].sign(SERVER, 0, send)
        await wallets[0].sign(identity.peer_id, 5, send)
        assert ledger.owners[identity.peer_id].signed == 60

    asyncio.run(scenario())


def test_a_server_cannot_show_a_tab_that_is_none(identity, tmp_path):
    wallet, other = Wallet(identity.path), load_or_create(tmp_path / "other")
    for tab in (
        sign_claim(Tab(identity.peer_id, "Another", 10**9), identity.sign),
        sign_claim(Tab(other.peer_id, SERVER, 10**9), other.sign),
        sign_claim(Tab(identity.peer_id, SERVER, 10**9), other.sign),
    ):
        with pytest.raises(ProtocolViolation):
            wallet.note_tab(SERVER, tab)


def test_a_key_that_is_not_there_is_not_made(tmp_path: Path):
    with pytest.raises(IdentityError, match=r"swarm points .* --new"):
        Wallet(tmp_path / "misspelled")
    assert not (tmp_path / "misspelled").exists()
