"""Attacks on the DHT by one stranger, over real libp2p daemons. Each one succeeded on commit a254ca2.

In all of them an honest server's announcement is read by a client before, during and after the attack, and an honest
node keeps answering.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import msgspec
import pytest
import uvloop
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from swarm.data_structures import ModelInfo, ServerInfo
from swarm.dht.announcer import Announcer
from swarm.dht.directory import fetch_servers
from swarm.dht.server_records import encode_announcement, model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.identity import peer_id_of
from swarm.transport.p2p import P2PConfig, Peer
from tests.infos import server_info
from tests.transport.dht.answers import answer_finds

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

MODEL, BLOCKS = "model", 4
LONG_S = 300.0
READ_LIMIT_S = 20.0
"""A look-up that takes longer has not ended."""

TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def _collect():
    yield
    gc.collect()  # while this module's filter holds


class World(AsyncExitStack):
    """A bootstrap peer and a server, which are honest nodes; a client that reads; and a stranger."""

    async def __aenter__(self) -> World:
        await super().__aenter__()
        self.bootstrap = await self._join()
        self.known = await self.bootstrap.visible_addresses()
        self.server = await self._join(*self.known)
        self.stranger = await self._join(*self.known)
        self.info = server_info(0, BLOCKS, self.server.peer_id)
        announcer = Announcer(self.server, ModelInfo(MODEL, BLOCKS, "main"), lambda: self.info, LONG_S / 2.5)
        assert await announcer.announce()
        await self.require_honest_server()
        return self

    async def _join(self, *known: str, listen: bool = True) -> Peer:
        hosts = ("/ip4/127.0.0.1/tcp/0",) if listen else ()
        peer = await Peer.create(P2PConfig(known, hosts), AnnouncementValidator())
        self.push_async_callback(peer.shutdown)
        return peer

    async def read(self, *more: Peer) -> list[ServerInfo]:
        """What a new client reads, which also knows the peers `more`."""
        known = [*self.known, *[address for peer in more for address in await peer.visible_addresses()]]
        client = await self._join(*known, listen=False)
        async with asyncio.timeout(READ_LIMIT_S):
            return await fetch_servers(client.dht, MODEL, BLOCKS)

    async def require_honest_server(self, *more: Peer) -> None:
        """The bystander: the honest announcement is read as it was written."""
        assert self.info in await self.read(*more)

    async def store(self, node: Peer, record: DHTRecord, in_cache: bool = False) -> bool:
        """Whether an honest node takes a record from the stranger."""
        request = dht_pb2.StoreRequest(
            keys=[record.key],
            subkeys=[record.subkey],
            values=[record.value],
            expiration_time=[record.expiration_time],
            in_cache=[in_cache],
        )
        with suppress(P2PDaemonError, P2PHandlerError):  # the node refused the whole request
            stub = self.stranger.dht.protocol.get_stub(PeerID.from_base58(node.peer_id))
            return list((await stub.rpc_store(request, timeout=TIMEOUT_S)).store_ok) == [True]
        return False

    async def stored_under(self, node: Peer, keys: Sequence[bytes]) -> int:
        """Under how many of the keys an honest node keeps anything."""
        stub = self.stranger.dht.protocol.get_stub(PeerID.from_base58(node.peer_id))
        count = 0
        for key in keys:
            answer = await stub.rpc_find(dht_pb2.FindRequest(keys=[key]), timeout=TIMEOUT_S)
            count += answer.results[0].type != dht_pb2.NOT_FOUND
        return count

    @property
    def honest(self) -> tuple[Peer, Peer]:
        return self.bootstrap, self.server

    def own_info(self, **changes: object) -> ServerInfo:
        """What the stranger could announce of itself."""
        return replace(self.info, peer_id=self.stranger.peer_id, **changes)

    @property
    def key(self) -> RSAPrivateKey:
        return self.stranger.identity.private_key


def record(
    key: RSAPrivateKey, name: str, payload: bytes, expires: float | None = None, subkey: bytes | None = None
) -> DHTRecord:
    """A record under the key `name`, well signed by `key`."""
    owner = RSASignatureValidator(key)
    expires = time.time() + 2 * LONG_S - 20 if expires is None else expires
    unsigned = DHTRecord(
        DHTID.generate(name).to_bytes(),
        MSGPackSerializer.dumps(owner.local_public_key if subkey is None else subkey),
        MSGPackSerializer.dumps(payload),
        expires,
    )
    signature = key.sign(owner._serialize_record(unsigned))
    return replace(unsigned, value=unsigned.value + owner.SIGNATURE_FORMAT.replace(b"_value_", signature))


def play(attack: Callable[[World], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with World() as world:
            await attack(world)

    uvloop.run(scenario())


def test_one_malformed_answer_holds_nobody_up():
    """A dictionary whose maximum size is a word. On a254ca2 every look-up of a reader that got it never ended."""

    async def attack(world: World) -> None:
        subkey = RSASignatureValidator(world.key).local_public_key

        async def answer(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
            results = []
            for key in request.keys:
                own = record(world.key, model_key(MODEL, 0), encode_announcement(MODEL, world.own_info()))
                inner = MSGPackSerializer.dumps(["x", own.expiration_time, [[subkey, own.value, own.expiration_time]]])
                value = msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, inner))
                found = key == own.key
                results.append(
                    dht_pb2.FindResult(
                        type=dht_pb2.FOUND_DICTIONARY if found else dht_pb2.NOT_FOUND,
                        value=value if found else b"",
                        expiration_time=own.expiration_time,
                    )
                )
            return dht_pb2.FindResponse(results=results)

        answer_finds(world.stranger, answer)
        for _ in range(3):
            await world.require_honest_server(world.stranger)

    play(attack)


def test_nobody_caches_what_a_stranger_says_in_place_of_what_was_stored():
    """One cached record with a later expiry at each node. On a254ca2 it replaced the whole dictionary in answers, so
    that readers saw the stranger and no honest server."""

    async def attack(world: World) -> None:
        hiding = record(world.key, model_key(MODEL, 0), encode_announcement(MODEL, world.own_info()))
        taken = [await world.store(node, hiding, in_cache=True) for node in world.honest]
        await world.require_honest_server()
        assert taken == [False, False]
        assert [info.peer_id for info in await world.read()] == [world.server.peer_id]

    play(attack)


def test_an_identity_has_one_record_under_a_key():
    """Comments after the public key made any number of subkeys, and a record could have 63 KB, so that 70 of them made
    the answer of each node too long for the transport. On a254ca2 readers then found nothing at all."""

    async def attack(world: World) -> None:
        subkey = RSASignatureValidator(world.key).local_public_key
        payload = encode_announcement(MODEL, world.own_info())
        large = largest(world.own_info())
        taken = 0
        for number in range(70):
            other = subkey[:-1] + b" %d]" % number
            for node in world.honest:
                taken += await world.store(node, record(world.key, model_key(MODEL, 0), large, subkey=other))
                taken += await world.store(node, record(world.key, model_key(MODEL, 0), payload, subkey=other))
        await world.require_honest_server()
        assert taken == 0
        assert await world.store(world.server, record(world.key, model_key(MODEL, 0), payload))  # in one spelling
        assert {info.peer_id for info in await world.read()} == {world.server.peer_id, world.stranger.peer_id}

    play(attack)


def largest(info: ServerInfo) -> bytes:
    """As large as announcements could be."""
    name = "\U0001f600" * 256
    fields = msgspec.msgpack.decode(encode_announcement(MODEL, info))
    fields |= dict.fromkeys(("revision", "name", "compute_dtype", "quantization", "version"), name)
    fields |= {"adapters": [name] * 16, "round_trips": [[name, 1.0]] * 16, "end": 1900}
    return msgspec.msgpack.encode(fields | {"digests": ["0123456789ab"] * 1900})


def test_a_record_lies_only_under_the_key_that_its_content_names():
    """A valid announcement under the keys of other blocks and models, and under keys of nothing. On a254ca2 all nodes
    took it everywhere."""

    async def attack(world: World) -> None:
        payload = encode_announcement(MODEL, world.own_info())
        names = [model_key(MODEL, 1), model_key("another", 0), "anything", "swarm-models/0"]
        taken = [await world.store(node, record(world.key, name, payload)) for node in world.honest for name in names]
        await world.require_honest_server()
        assert taken == [False] * len(taken)

    play(attack)


def test_an_identity_has_a_few_places_at_a_node():
    """Announcements of fifty models that do not exist. On a254ca2 a node kept all of them, and as many as came."""

    async def attack(world: World) -> None:
        names = [f"no such model {number}" for number in range(50)]
        for name in names:
            payload = encode_announcement(name, world.own_info())
            await world.store(world.server, record(world.key, model_key(name, 0), payload))
        kept = await world.stored_under(world.server, [DHTID.generate(model_key(name, 0)).to_bytes() for name in names])
        await world.require_honest_server()
        assert 0 < kept <= 8

    play(attack)


def test_a_peer_stores_only_its_own_records():
    """A peer stores for identities that it has just made. On a254ca2 one connection could fill a key with any number
    of them; now each identity needs a libp2p peer of its own."""

    async def attack(world: World) -> None:
        taken = 0
        for _ in range(5):
            key = RSAPrivateKey()
            info = replace(world.info, peer_id=peer_id_of(key.get_public_key().to_bytes()))
            for node in world.honest:
                taken += await world.store(node, record(key, model_key(MODEL, 0), encode_announcement(MODEL, info)))
        assert [info.peer_id for info in await world.read()] == [world.server.peer_id]
        assert taken == 0

    play(attack)


def test_no_record_lives_for_ever():
    """An expiry that is no number. On a254ca2 it was neither too early nor too late, so the record never ended, and
    behind it no other record was ever removed."""

    async def attack(world: World) -> None:
        payload = encode_announcement(MODEL, world.own_info())
        forever = record(world.key, model_key(MODEL, 0), payload, math.nan)
        taken = [await world.store(node, forever) for node in world.honest]
        await world.require_honest_server()
        assert taken == [False, False]

    play(attack)


def garbage(world: World) -> list[dht_pb2.StoreRequest]:
    """Requests to store that are wrong in their form."""
    good = record(world.key, model_key(MODEL, 0), encode_announcement(MODEL, world.own_info()))
    dictionary = DictionaryDHTValue()
    dictionary.maxsize = "x"
    fields = {
        "keys": [good.key],
        "subkeys": [good.subkey],
        "values": [good.value],
        "expiration_time": [good.expiration_time],
        "in_cache": [False],
    }
    changes: list[dict[str, list[object]]] = [
        {"keys": []},
        {"keys": [b"short"]},
        {"keys": [bytes(100_000)]},
        {"keys": [good.key] * 1000, "in_cache": [False] * 1000},
        {"subkeys": []},
        {"subkeys": [b""]},
        {"subkeys": [b"\xc0"]},
        {"subkeys": [b"\x91" * 2000]},
        {"subkeys": [b""], "values": [MSGPackSerializer.dumps(dictionary)]},
        {"subkeys": [MSGPackSerializer.dumps(b"[owner:" * 5000)]},
        {"values": [b"[signature:" * 6000]},
        {"values": [bytes(1_000_000)]},
        {"expiration_time": [1e300]},
    ]
    return [dht_pb2.StoreRequest(**{**fields, **change}) for change in changes]


def test_requests_that_are_wrong_in_form_harm_nobody():
    """On a254ca2 some of them were taken, and some kept a node busy for seconds with regular expressions."""

    async def attack(world: World) -> None:
        for node in world.honest:
            stub = world.stranger.dht.protocol.get_stub(PeerID.from_base58(node.peer_id))
            for request in garbage(world):
                with suppress(P2PDaemonError, P2PHandlerError):
                    assert True not in (await stub.rpc_store(request, timeout=TIMEOUT_S)).store_ok
            for keys in ([b"short"], [bytes(20)] * 5000, [bytes(100_000)], [b""]):
                with suppress(P2PDaemonError, P2PHandlerError):
                    answer = await stub.rpc_find(dht_pb2.FindRequest(keys=keys), timeout=TIMEOUT_S)
                    assert all(result.type == dht_pb2.NOT_FOUND for result in answer.results)
        await world.require_honest_server()

    play(attack)


def test_requests_that_are_given_up_are_forgotten():
    """Pings that the stranger gives up while the node is still working on them: on a254ca2 the node kept each of them
    for ever, with all that it held."""

    async def attack(world: World) -> None:
        handlers = world.stranger.dht.p2p._client.control.unary_handlers
        [name] = [name for name in handlers if name.endswith("rpc_ping")]

        async def hang(data: bytes, sender: PeerID) -> bytes:
            await asyncio.Event().wait()
            return b""

        handlers[name] = hang  # the node pings back, and waits
        stub = world.stranger.dht.protocol.get_stub(PeerID.from_base58(world.server.peer_id))
        request = dht_pb2.PingRequest(peer=world.stranger.dht.protocol.node_info, validate=True)
        for _ in range(5):
            with suppress(TimeoutError, P2PHandlerError):
                await stub.rpc_ping(request, timeout=0.2)
        running = world.server.dht.p2p._client.control._handler_tasks
        async with asyncio.timeout(READ_LIMIT_S):
            while running:
                await asyncio.sleep(0.05)
        await world.require_honest_server()

    play(attack)
