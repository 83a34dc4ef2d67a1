"""Announcements over real DHT nodes on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo, ServerInfo, ServerState, Span, Whereabouts
from swarm.dht import directory as module
from swarm.dht import model_records
from swarm.dht.announcer import Announcer, adapter_names
from swarm.dht.directory import (
    MAX_HOLDERS,
    REFRESH_S,
    RelayDirectory,
    bounded_picture,
    fetch_models,
    fetch_servers,
    relays_among,
)
from swarm.dht.server_records import encode_announcement, model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import DhtError
from swarm.transport.dht.node import FoundRecord
from swarm.transport.dht.records import RecordRules, sign
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.reach.address_book import AddressBook
from swarm.transport.reach.relay_choice import Relay
from tests import virtual_time
from tests.bad_peers import Anything
from tests.infos import server_info

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

MODEL, BLOCKS = "model", 6
INFO = ModelInfo(MODEL, BLOCKS, "main")
LONG = 60.0
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _collect():
    yield
    gc.collect()  # while this module's filter holds


def info_of(peer: Peer, span: Span, **changes: object) -> ServerInfo:
    info = ServerInfo(
        peer_id=peer.peer_id,
        span=span,
        state=ServerState.ONLINE,
        throughput=1.0,
        cache_tokens_free=7,
        revision="main",
        digests=("0123456789ab",) * span.length,
        compute_dtype="float32",
        quantization="none",
        version="1",
    )
    return dataclasses.replace(info, **changes)


def announcer(peer: Peer, span: Span, period: float = LONG, **changes: object) -> Announcer:
    return Announcer(peer, INFO, lambda: info_of(peer, span, **changes), period)


class Peers(AsyncExitStack):
    """Peers of one swarm, shut down at the end; the first is the one that the others join by."""

    async def add(self, rules: RecordRules | None = None, listen: bool = True) -> Peer:
        hosts = ("/ip4/127.0.0.1/tcp/0",) if listen else ()
        known = getattr(self, "known", ())
        peer = await Peer.create(P2PConfig(known, hosts), rules or AnnouncementValidator())
        self.push_async_callback(peer.shutdown)
        if not known:
            self.known = await peer.visible_addresses()
        return peer


async def store_at_others(peer: Peer, name: str, payload: bytes) -> bool:
    """Sign and store a record as it is; whether all other nodes keep it."""
    protocol = peer.dht.protocol
    record = sign(name, payload, time.time() + LONG, peer.identity.private_key)
    others = protocol.table.nearest(record.key, 100)
    assert others
    return all([(await protocol.call_store(other, [record]))[0] for other in others])


async def until(condition) -> None:
    """Wait until the coroutine function returns something true."""
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


def test_servers_are_found_and_forgers_are_not():
    async def scenario():
        async with Peers() as peers:
            await peers.add()
            one, two, client = await peers.add(), await peers.add(), await peers.add(listen=False)
            cheat = await peers.add(Anything())

            async def found() -> list[ServerInfo]:
                return await fetch_servers(client.dht, MODEL, BLOCKS)

            assert await found() == []
            assert await announcer(one, Span(0, 4)).announce()
            assert await announcer(two, Span(2, 6), state=ServerState.JOINING, digests=()).announce()
            expected = [info_of(one, Span(0, 4)), info_of(two, Span(2, 6), state=ServerState.JOINING, digests=())]
            assert await found() == expected
            assert await fetch_servers(client.dht, "another model", BLOCKS) == []

            # The other ways to lie are in test_validation; this one shows that the nodes ask the validator.
            async def forge(info: ServerInfo, block: int) -> bool:
                return await store_at_others(cheat, model_key(MODEL, block), encode_announcement(MODEL, info))

            assert not await forge(info_of(one, Span(1, 3)), 1)
            assert await forge(info_of(cheat, Span(1, 3)), 1)
            # Well signed, but under another block's key than its own.
            assert not await forge(info_of(cheat, Span(3, 4)), 5)
            # Beyond the end of the model, which nodes do not know.
            assert await forge(info_of(cheat, Span(4, BLOCKS + 1)), 4)
            assert await found() == [expected[0], info_of(cheat, Span(1, 3)), expected[1]]
            assert await announcer(one, Span(3, 6)).announce()  # it has moved; its former record lives on
            assert [info.span for info in await found() if info.peer_id == one.peer_id] == [Span(3, 6)]

    uvloop.run(scenario())


def test_the_models_of_a_swarm_are_listed_while_somebody_serves_them():
    async def scenario():
        async with Peers() as peers:
            await peers.add()
            one, two, three = [await peers.add() for _ in range(3)]
            client, cheat = await peers.add(listen=False), await peers.add(Anything())
            other = ModelInfo("another model", 30, "main")
            assert await fetch_models(client.dht) == []
            for peer in (two, three):
                assert await announcer(peer, Span(0, 2)).announce()
            assert await Announcer(one, other, lambda: info_of(one, Span(0, 2)), LONG).announce()
            assert await fetch_models(client.dht) == [INFO, other]

            async def claim(name: str, owner: str) -> bool:
                payload = model_records.encode_model(owner, ModelInfo(name, 2000, "main"))
                return await store_at_others(cheat, model_records.list_key(owner), payload)

            assert not await claim(MODEL, one.peer_id)
            assert await claim(MODEL, cheat.peer_id)
            assert await fetch_models(client.dht) == [INFO, other]  # two against one
            # Who leaves names no model any more, and an announcement is no model.
            leaving = announcer(cheat, Span(0, 2), state=ServerState.OFFLINE)
            assert await leaving.announce()
            assert await fetch_models(client.dht) == [INFO, other]

    uvloop.run(scenario())


def test_a_folders_path_is_not_announced(tmp_path):
    (tmp_path / "mine").mkdir()
    assert adapter_names([str(tmp_path / "mine"), "org/pirate", str(tmp_path / "mine")]) == ("mine", "org/pirate")
    assert len(adapter_names(map(str, range(50)))) == 16
    assert adapter_names(["a" * 300]) == ("a" * 256,)


def test_a_failing_announcement_is_tried_again(caplog):
    async def scenario():
        async with Peers() as peers:
            server = await peers.add()
            calls = 0

            def describe() -> ServerInfo:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise RuntimeError("not now")
                return info_of(server, Span(0, 2))

            announcing = Announcer(server, INFO, describe, 0.05)
            announcing.start()

            async def is_there() -> bool:
                return bool(await fetch_servers(server.dht, MODEL, BLOCKS))

            await until(is_there)
            await announcing.stop()

    uvloop.run(scenario())
    assert "announcing failed" in caplog.text


def at(number: int, start: int, end: int) -> ServerInfo:
    return server_info(start, end, f"peer {number}")


spans = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: (pair[0], min(6, pair[0] + pair[1])))


@given(st.lists(spans, max_size=30), st.lists(spans, max_size=100), st.integers(1, 5))
def test_no_flood_pushes_out_who_is_kept_without_it(known, flood, limit):
    honest = [at(number, *span) for number, span in enumerate(known)]
    kept = bounded_picture(honest, 6, limit)
    strangers = [at(1000 + number, *span) for number, span in enumerate(flood)]
    with_flood = bounded_picture([*honest, *strangers], 6, limit)
    assert with_flood[: len(kept)] == kept
    assert len(with_flood) <= 6 * limit
    # No block has fewer holders than it could have, up to the limit.
    for block in range(6):
        holders = [info for info in with_flood if block in info.span]
        all_of_them = [info for info in (*honest, *strangers) if block in info.span]
        assert len(holders) >= min(limit, len(all_of_them))


def test_a_reader_keeps_who_served_it_in_a_flood_of_new_identities():
    """Four hundred identities announce every block; the honest servers came later than all of them."""

    class Dht:
        book = AddressBook()

        def __init__(self, infos: list[ServerInfo]) -> None:
            self.infos = infos

        def best_first(self, owners: Iterable[str]) -> list[str]:
            return sorted(owners, key=lambda owner: owner not in {one.peer_id for one in honest})

        async def find(self, names: Sequence[str]) -> dict[str, list[FoundRecord]]:
            expires = time.time() + LONG
            records = [FoundRecord(one.peer_id, encode_announcement(MODEL, one), expires) for one in self.infos]
            return {name: records if name == model_key(MODEL, 0) else [] for name in names}

    flood = [at(number, 0, BLOCKS) for number in range(400)]
    honest = [server_info(0, BLOCKS, f"honest {number}") for number in range(3)]
    dht: Any = Dht([*flood, *honest])
    found = asyncio.run(fetch_servers(dht, MODEL, BLOCKS))
    assert len(found) == MAX_HOLDERS
    assert {info.peer_id for info in honest} <= {info.peer_id for info in found}


PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PUBLIC, SECOND = "/ip4/81.2.69.142/tcp/31337", "/ip6/2a02:8071:b783::1/tcp/31337"
RELAYED = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}/p2p-circuit"
LAN = "/ip4/192.168.0.7/tcp/31337"


def server(name: str, *addresses: str, relayed_peers: int = 64) -> ServerInfo:
    where = Whereabouts(addresses, (LAN,), "81.2.69.142")
    return server_info(0, 2, name, whereabouts=where, relayed_peers=relayed_peers)


def test_those_relay_who_say_so_and_can_be_dialed():
    found = relays_among(
        [
            server("relays", PUBLIC),
            server("relays, too", RELAYED, SECOND, PUBLIC, relayed_peers=1),
            server("does not", PUBLIC, relayed_peers=0),
            server("is behind a relay itself", RELAYED),
            server("is nowhere"),
        ]
    )
    assert found == [Relay("relays", PUBLIC), Relay("relays, too", SECOND)]
    assert relays_among([]) == []


class Dht:
    """What the DHT says; it notes how often it was asked."""

    def __init__(self) -> None:
        self.servers: list[ServerInfo] = []
        self.fails = False
        self.asked: list[object] = []
        self.dht: Any = object()

    async def fetch(self, dht: object, model: str, blocks: int) -> list[ServerInfo]:
        assert dht is self.dht
        self.asked.append((model, blocks))
        if self.fails:
            raise DhtError("nobody answers")
        return self.servers


@pytest.fixture
def dht(monkeypatch) -> Dht:
    made = Dht()
    monkeypatch.setattr(module, "fetch_servers", made.fetch)
    return made


def test_an_answer_of_the_dht_is_used_for_a_while(dht):
    async def scenario():
        directory = RelayDirectory(dht, "model", 12)
        dht.servers = [server("one", PUBLIC)]
        assert await directory.relays() == [Relay("one", PUBLIC)]
        dht.servers = [server("two", SECOND)]
        await asyncio.sleep(REFRESH_S - 1)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        assert dht.asked == [("model", 12)]
        await asyncio.sleep(2)
        assert await directory.relays() == [Relay("two", SECOND)]
        assert dht.asked == [("model", 12)] * 2

    virtual_time.run(scenario)


def test_if_the_dht_does_not_answer_the_relays_of_before_are_still_there(dht):
    async def scenario():
        directory = RelayDirectory(dht, "model", 12)
        dht.fails = True
        assert await directory.relays() == []
        dht.fails, dht.servers = False, [server("one", PUBLIC)]
        await asyncio.sleep(REFRESH_S)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        dht.fails = True
        await asyncio.sleep(REFRESH_S)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        assert len(dht.asked) == 3

    virtual_time.run(scenario)
