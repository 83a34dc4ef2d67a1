"""Nodes of the DHT over real libp2p daemons on loopback."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import DhtError, ProtocolViolation
from swarm.transport.dht import messages
from swarm.transport.dht import node as module
from swarm.transport.dht import protocol as protocol_module
from swarm.transport.dht.node import DhtNode, FoundRecord
from swarm.transport.dht.protocol import MAX_BAD_RECORDS, REQUEST_TIMEOUT_S, Found
from swarm.transport.dht.records import Record, RecordProblem, key_bytes, sign
from swarm.transport.p2p import P2PConfig, Peer
from tests import virtual_time
from tests.transport.dht.answers import answer_finds
from tests.transport.dht.hostile import Anywhere, dictionary, owner_name, private_key
from tests.transport.dht.test_routing_table import OWN, PEERS
from tests.transport.dht.test_search import liar
from tests.waiting import TIMEOUT_S

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

LONG_S = 100.0
LOOK_UP_S = 20.0
"""Of the virtual look-ups."""


@pytest.fixture(autouse=True)
def _collect():
    yield
    gc.collect()  # while this module's filter holds


class Peers(AsyncExitStack):
    """Peers of one DHT, shut down at the end; the first is the one that the others join by."""

    known: tuple[str, ...] = ()

    async def add(self, listen: bool = True, known: tuple[str, ...] = ()) -> Peer:
        hosts = ("/ip4/127.0.0.1/tcp/0",) if listen else ()
        peer = await Peer.create(P2PConfig(known or self.known, hosts), Anywhere())
        self.push_async_callback(peer.shutdown)
        if not self.known:
            self.known = await peer.visible_addresses()
        return peer


def play(scenario: Callable[[Peers], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Peers() as peers:
            await scenario(peers)

    uvloop.run(run())


def reader() -> DhtNode:
    """A node that only asks, for virtual time. It knows one other node, whose answers a test plays: `call_find`."""
    node = DhtNode(
        SimpleNamespace(peer_id=OWN), SimpleNamespace(private_key=private_key(0)), Anywhere(), is_client=True
    )
    node.protocol.table.add(PEERS[0])
    return node


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


async def refuse(*_: object) -> Any:
    raise DhtError("lost")


async def hide(peer: PeerID, keys: Sequence[bytes]) -> Found:
    return Found({key: [] for key in keys}, {key: [] for key in keys})


def tell(*records: Record) -> Callable[[PeerID, Sequence[bytes]], Awaitable[Found]]:
    async def answer(peer: PeerID, keys: Sequence[bytes]) -> Found:
        return Found({key: [(owner_name(0), one) for one in records if one.key == key] for key in keys}, {})

    return answer


def test_what_one_peer_stores_all_others_find():
    async def scenario(peers):
        first = await peers.add()
        expires = time.time() + LONG_S
        assert await first.dht.store([("lone", b"x", expires)]) == [True]  # nobody else is there yet
        assert [record.payload for record in (await first.dht.find(["lone"]))["lone"]] == [b"x"]
        one, two = [await peers.add() for _ in range(2)]
        client = await peers.add(listen=False)
        assert await one.dht.store([("a", b"one", expires), ("b", b"other", expires)]) == [True, True]
        assert await client.dht.store([("a", b"two", expires)]) == [True]
        for peer in (first, one, two, client):
            found = await peer.dht.find(["a", "b", "c"])
            assert sorted(record.payload for record in found["a"]) == [b"one", b"two"]
            assert found["b"] == [FoundRecord(one.peer_id, b"other", expires)]
            assert found["c"] == []
        assert await one.dht.store([("a", b"newer", expires + 1)]) == [True]
        assert b"newer" in {record.payload for record in (await client.dht.find(["a"]))["a"]}
        assert len(client.dht.protocol.store) == 0  # who only asks keeps nothing
        assert client.dht.protocol.table.nearest(key_bytes("a"), 9)
        assert all(PeerID.from_base58(client.peer_id) not in peer.dht.protocol.table for peer in (first, one, two))

    play(scenario)


@pytest.mark.slow
def test_a_node_that_hangs_costs_one_request_and_then_nothing(caplog):
    async def scenario(peers):
        await peers.add()
        server, silent = await peers.add(), await peers.add()
        assert await server.dht.store([("a", b"x", time.time() + LONG_S)]) == [True]
        asked = []

        async def hang(request):
            asked.append(request)
            await never()

        answer_finds(silent, hang)
        client = await peers.add(listen=False)  # which meets it while it joins
        caplog.clear()
        assert (await client.dht.find(["a"], timeout_s=LONG_S))["a"]
        assert "took more than" not in caplog.text
        assert client.dht.protocol.table.is_silent(PeerID.from_base58(silent.peer_id), time.monotonic())
        assert asked
        asked.clear()
        assert (await client.dht.find(["a"]))["a"]
        assert not asked

    play(scenario)


def test_a_look_up_ends_when_its_time_is_over():
    async def scenario():
        node = reader()
        node.protocol.call_find = never
        with pytest.raises(DhtError, match="none of the"):
            await node.find([str(number) for number in range(300)], timeout_s=LOOK_UP_S)
        assert time.monotonic() == pytest.approx(LOOK_UP_S)
        node.protocol.call_find = refuse
        with pytest.raises(DhtError, match="none of the 1 known nodes of the DHT answered; check"):
            await node.find(["a"])
        with pytest.raises(DhtError, match="none of the"):
            await node.store([("a", b"x", time.time() + LONG_S)])
        node.protocol.call_find = hide
        assert await node.find(["a"]) == {"a": []}
        assert time.monotonic() == pytest.approx(LOOK_UP_S)  # the next one is not held up

    virtual_time.run(scenario)


def test_what_was_found_stays_known_until_it_expires(monkeypatch, caplog):
    """A look-up that is cut short, or that liars answer, takes nothing away from what a reader knows."""

    async def half(peer, keys):
        return await (never if key_bytes("a") in keys else hide)(peer, keys)

    async def scenario():
        now = time.time()
        node = reader()
        node.protocol.call_find = tell(*(sign(name, b"x", now + LONG_S, private_key(0)) for name in ("a", "b")))
        found = await node.find(["a", "b"])
        assert all(found.values())
        known = node.protocol.table.peer_ids()

        node.protocol.call_find = hide
        assert await node.find(["b", "a"]) == found
        monkeypatch.setattr(module, "KEYS_PER_SEARCH", 1)
        node.protocol.call_find = half
        assert await node.find(["a", "b"], timeout_s=LOOK_UP_S) == found
        assert "took more than" in caplog.text
        node.protocol.call_find = never
        with pytest.raises(DhtError, match="none of the"):
            await node.find(["a", "b"], timeout_s=LOOK_UP_S)
        node.protocol.call_find = hide
        monkeypatch.setattr(module.time, "time", lambda: now + LONG_S + 1)
        assert await node.find(["a", "b"]) == {"a": [], "b": []}
        assert node.protocol.table.peer_ids() == known
        assert not node._found

    virtual_time.run(scenario)


def test_the_last_keys_of_a_look_up_have_time_as_well(monkeypatch):
    """Otherwise whoever answers slowly for the first ones could hide them."""
    monkeypatch.setattr(module, "KEYS_PER_SEARCH", 1)
    monkeypatch.setattr(module, "MIN_SEARCH_S", 0.0)

    async def slow(peer, keys):
        await asyncio.sleep(LONG_S if key_bytes("a") in keys else 0.4 * LOOK_UP_S)
        return await tell(sign("b", b"y", time.time() + LONG_S, private_key(0)))(peer, keys)

    async def scenario():
        node = reader()
        node.protocol.call_find = slow
        found = await node.find(["a", "b"], timeout_s=LOOK_UP_S)
        assert [record.payload for record in found["b"]] == [b"y"]

    virtual_time.run(scenario)


def test_a_reader_remembers_so_much_and_no_more(monkeypatch):
    async def scenario(peers):
        first = await peers.add()
        expires = time.time() + LONG_S
        names = [str(number) for number in range(8)]
        assert all(await first.dht.store([(name, b"x", expires) for name in names]))
        client = await peers.add(listen=False)
        monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
        for name in names:
            await client.dht.find([name])
        assert list(client.dht._found) == [key_bytes(name) for name in names[-3:]]

    play(scenario)


def test_strangers_cannot_have_a_node_verify_without_end(monkeypatch):
    """However many identities they have; whose records are there is still heard."""

    async def scenario(peers):
        first = await peers.add()
        expires = time.time() + LONG_S
        old, stranger = await peers.add(), await peers.add()
        known = sign("known", b"x", expires, old.identity.private_key)
        assert first.dht.protocol.store.store(known, old.peer_id, time.time())
        monkeypatch.setattr(protocol_module, "CHECK_BURST", 8.0)
        first.dht.protocol._checks = TokenBuckets(8.0, 0.0, 1)
        refused = []
        first.dht.protocol.observe_refusal = refused.append
        target = PeerID.from_base58(first.peer_id)

        async def store(peer, number):
            key = peer.identity.private_key
            return await peer.dht.protocol.call_store(target, [sign(str(number), b"x", expires, key)])

        monkeypatch.setattr(first.dht.protocol.store, "has_any_of", lambda owner: owner == old.peer_id)
        assert [await store(stranger, number) for number in range(6)] == [[True]] * 4 + [[False]] * 2
        assert refused == [RecordProblem.BUSY] * 2
        assert await store(old, 0) == [True]
        assert not stranger.dht.protocol.table.is_silent(target, time.monotonic())  # it did nothing wrong

    play(scenario)


def found_in(value: bytes, **fields: object) -> Callable[[dht_pb2.FindRequest], Awaitable[dht_pb2.FindResponse]]:
    async def answer(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, **fields)
        return dht_pb2.FindResponse(results=[result] * len(request.keys))

    return answer


async def too_few(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
    return dht_pb2.FindResponse(results=[])


async def invalid_records(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
    begin = time.time() + LONG_S
    items = [[b"[owner:x]", b"x", begin + number] for number in range(2 * MAX_BAD_RECORDS)]
    return await found_in(dictionary(items=items))(request)


WRONG = {
    "no dictionary": found_in(b"garbage"),
    "too few": too_few,
    "invalid records": invalid_records,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_its_senders_fault_alone(kind):
    async def scenario(peers):
        await peers.add()
        server, bad = await peers.add(), await peers.add()
        assert await server.dht.store([("a", b"x", time.time() + LONG_S)]) == [True]
        client = await peers.add(listen=False)
        answer_finds(bad, WRONG[kind])
        target = PeerID.from_base58(bad.peer_id)
        client.dht.protocol.table.add(target)
        for _ in range(2):
            assert [record.payload for record in (await client.dht.find(["a"]))["a"]] == [b"x"]
        assert client.dht.protocol.table.is_silent(target, time.monotonic())
        assert target not in client.dht.protocol.table
        with pytest.raises(ProtocolViolation, match="an answer of the DHT"):
            await client.dht.protocol.call_find(target, [key_bytes("a")])

    play(scenario)


def test_records_that_are_just_over_spoil_no_answer():
    """Clocks differ a little, so records may have expired at the reader and not yet at the node: many, where many
    servers end at once."""

    async def scenario(peers):
        first = await peers.add()
        client = await peers.add(listen=False)
        good = sign("a", b"x", time.time() + LONG_S, private_key(0))
        old = sign("a", b"x", time.time() - 1, private_key(1))
        many = 2 * MAX_BAD_RECORDS
        items = [(record.subkey, record.value, record.expires) for record in (*[old] * many, good)]
        answer_finds(first, found_in(dictionary(items=items)))
        refused = []
        client.dht.protocol.observe_refusal = refused.append
        assert [record.payload for record in (await client.dht.find(["a"]))["a"]] == [b"x"]
        assert refused == [RecordProblem.LIFETIME] * many
        assert not client.dht.protocol.table.is_silent(PeerID.from_base58(first.peer_id), time.monotonic())

    play(scenario)


def test_keys_whose_nodes_do_not_answer_hide_no_others(monkeypatch):
    async def scenario(peers):
        first = await peers.add()
        assert await first.dht.store([("a", b"x", time.time() + LONG_S)]) == [True]
        client = await peers.add(listen=False)
        ask = client.dht.protocol.call_find

        async def lose_b(peer, keys):
            if key_bytes("b") in keys:
                raise DhtError("lost")
            return await ask(peer, keys)

        monkeypatch.setattr(client.dht.protocol, "call_find", lose_b)
        monkeypatch.setattr(module, "KEYS_PER_SEARCH", 1)
        for names in (["a", "b"], ["b", "a"]):
            found = await client.dht.find(names)
            assert [record.payload for record in found["a"]] == [b"x"]
            assert found["b"] == []
        with pytest.raises(DhtError, match="none of the 1 known nodes"):
            await client.dht.find(["b"])

    play(scenario)


def test_a_bootstrap_peer_that_looks_nothing_up_forgets_who_is_gone(monkeypatch):
    """Otherwise it would name those that have gone to everybody who joins, until it knew nobody else."""
    monkeypatch.setattr(protocol_module, "CHECK_PERIOD_S", 0.05)

    async def scenario(peers):
        first, stays, goes = [await peers.add() for _ in range(3)]
        await goes.shutdown()
        async with asyncio.timeout(TIMEOUT_S):
            while goes.peer_id in first.dht.known_peers:
                await asyncio.sleep(0.02)
        assert stays.peer_id in first.dht.known_peers

    play(scenario)


def test_records_that_are_over_take_no_memory_even_if_nobody_asks_for_them(monkeypatch):
    monkeypatch.setattr(protocol_module, "CHECK_PERIOD_S", 0.05)

    async def scenario(peers):
        first, second = [await peers.add() for _ in range(2)]
        now, unix_time = time.time(), time.time
        assert await second.dht.store(
            [("soon over", b"payload", now + LONG_S), ("models", b"payload", now + 3 * LONG_S)]
        ) == [True, True]
        kept = first.dht.protocol.store
        assert len(kept) == 2
        monkeypatch.setattr(time, "time", lambda: unix_time() + 1.5 * LONG_S)
        async with asyncio.timeout(TIMEOUT_S):
            while len(kept) > 1:
                await asyncio.sleep(0.02)

    play(scenario)


def test_who_joins_in_a_crowd_is_told_to_try_again(monkeypatch):
    """The answer "you cannot be reached" would end its attempts to join."""
    monkeypatch.setattr(protocol_module, "MAX_PINGS_BACK", 0)

    async def scenario(peers):
        first, client = await peers.add(), await peers.add(listen=False)
        stub = client.dht.protocol.get_stub(PeerID.from_base58(first.peer_id))
        node = dht_pb2.NodeInfo(node_id=b"n" * 20)
        with pytest.raises(P2PHandlerError, match="try again"):
            await stub.rpc_ping(dht_pb2.PingRequest(peer=node, validate=True), timeout=REQUEST_TIMEOUT_S)

    play(scenario)


def test_nodes_that_are_not_there_hide_no_others():
    """A node names twenty nearer ones, which do not exist, for every key."""

    async def scenario(peers):
        first = await peers.add()
        server, bad = await peers.add(), await peers.add()
        assert await server.dht.store([("a", b"x", time.time() + LONG_S)]) == [True]

        async def lie(request):
            results = []
            for key in request.keys:
                results.append(dht_pb2.FindResult(type=dht_pb2.NOT_FOUND))
                messages.add_neighbors(results[-1], liar(bytes(key)))
            return dht_pb2.FindResponse(results=results)

        answer_finds(bad, lie)
        client = await peers.add(listen=False, known=(*peers.known, *await bad.visible_addresses()))
        assert [record.payload for record in (await client.dht.find(["a"]))["a"]] == [b"x"]
        assert PeerID.from_base58(first.peer_id) in client.dht.protocol.table

    play(scenario)


def test_nobody_is_known_under_an_id_that_it_chose():
    async def scenario(peers):
        first = await peers.add()
        stranger = await peers.add(listen=False)
        stub = stranger.dht.protocol.get_stub(PeerID.from_base58(first.peer_id))
        for node_id in (b"n" * 20, b"", b"x" * 5000, key_bytes("a")):
            node = dht_pb2.NodeInfo(node_id=node_id)
            with suppress(P2PHandlerError, P2PDaemonError):
                await stub.rpc_ping(dht_pb2.PingRequest(peer=node), timeout=REQUEST_TIMEOUT_S)
                await stub.rpc_find(dht_pb2.FindRequest(keys=[], peer=node), timeout=REQUEST_TIMEOUT_S)
        assert len(first.dht.protocol.table) == 0

    play(scenario)


def test_who_asks_too_much_is_refused_and_nobody_else():
    async def scenario(peers):
        first = await peers.add()
        one, two, other = [await peers.add(listen=False) for _ in range(3)]
        find = dht_pb2.FindRequest(keys=[key_bytes("a")])
        record = sign("b", b"x", time.time() + LONG_S, one.identity.private_key)
        store = messages.store_request([record] * messages.MAX_RECORDS_STORED, dht_pb2.NodeInfo())
        for greedy, name, request, count in ((one, "rpc_store", store, 200), (two, "rpc_find", find, 2000)):
            stub = greedy.dht.protocol.get_stub(PeerID.from_base58(first.peer_id))
            asked = [getattr(stub, name)(request, timeout=30) for _ in range(count)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, P2PHandlerError)]
            assert refused
            assert all("too many requests" in str(answer) for answer in refused)
        assert await other.dht.find(["a"]) == {"a": []}

    play(scenario)


def test_a_node_answers_others_only_while_they_can_reach_it():
    async def scenario(peers):
        first, one = [await peers.add() for _ in range(2)]
        target = one.dht.p2p.peer_id

        async def answers() -> bool:
            return await first.dht.protocol.call_ping(target)

        assert await answers()
        await one.dht.serve_others(True)  # as before
        assert await answers()
        for _ in range(2):
            await one.dht.serve_others(False)
            assert one.dht.protocol.node_info.node_id == b""
            assert not await answers()
        for _ in range(2):
            await one.dht.serve_others(True)
            assert one.dht.protocol.node_info.node_id != b""
            assert await answers()
        assert await one.dht.store([("a", b"one", time.time() + LONG_S)]) == [True]
        await one.dht.serve_others(False)
        assert [found.payload for found in (await one.dht.find(["a"]))["a"]] == [b"one"]  # it may still ask

    play(scenario)
