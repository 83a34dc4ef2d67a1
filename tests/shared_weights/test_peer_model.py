"""A model of which nothing is here but what peers say and send."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from swarm.data_structures import ModelInfo, ServerState
from swarm.errors import UnknownWeights, WeightsUnavailable
from swarm.protocol import messages
from swarm.shared_weights import peer_model
from swarm.shared_weights.manifest import FILES
from swarm.shared_weights.peer_model import PeerModel, find_model, sharers
from tests.infos import server_info
from tests.shared_weights import bad_holders as bad
from tests.shared_weights.peers import BLOCKS, NAME, PARTS, network, trusted, with_peers


def test_a_model_is_opened_and_liars_are_asked_for_nothing_more(parts, tmp_path):
    asked: list[messages.WeightsMessage] = []

    async def lie(stream, request, right):
        asked.append(request)
        await stream.send(messages.PartData(), bad.flipped(right))

    async def scenario(open_stream, find):
        async def learn():
            return trusted(parts)

        opened = await PeerModel.open(NAME, learn, open_stream, find, tmp_path)
        assert opened.checkpoint.name == NAME
        assert opened.checkpoint.blocks == BLOCKS
        assert set(opened.checkpoint.weight_map) == set(parts.checkpoint.weight_map)
        assert opened.checkpoint.stored_tensors == parts.checkpoint.stored_tensors, "before any of them is here"
        lies = len(asked)
        await opened.require(PARTS)
        assert len(asked) == lies, "it was not asked again"
        received = opened.received
        assert received.block_digests(0, BLOCKS) == parts.checkpoint.block_digests(0, BLOCKS)

    with_peers(scenario, liar=bad.holder(parts, lie), honest=bad.holder(parts, bad.honest))
    assert asked


def test_what_is_learned_later_has_to_agree_with_what_was_known(parts, other, tmp_path):
    """At 257aae6 it took the place of what was known, also that of another revision."""
    said = [trusted(parts, (FILES, "0")), trusted(other)]

    async def scenario(open_stream, find):
        async def learn():
            return said.pop(0)

        opened = await PeerModel.open(NAME, learn, open_stream, find, tmp_path)
        await opened.require(["0"])
        with pytest.raises(UnknownWeights):
            await opened.require(["1"])

    with_peers(scenario, one=bad.holder(parts, bad.honest))


def test_a_file_that_is_read_is_received_while_the_loop_goes_on(parts, tmp_path):
    """As a compute thread reads it, over a loop of its own."""

    async def scenario():
        async with network() as swarm:
            await swarm.add("one", bad.holder(parts, bad.honest))

            async def learn():
                return trusted(parts)

            def open_stream(peer):
                return swarm.hub.connect("receiver", peer)

            opened = await PeerModel.open(NAME, learn, open_stream, swarm.find, tmp_path)
            (file,) = {opened.checkpoint.weight_map[name] for name in parts.checkpoint.weight_map if ".1." in name}
            with pytest.raises(WeightsUnavailable, match="not here yet"):
                opened.checkpoint.fetch(file)
            assert opened.checkpoint.cached(file) is None
            path = await asyncio.to_thread(opened.checkpoint.fetch, file)
            assert path == opened.checkpoint.cached(file)
            digests = await asyncio.to_thread(opened.checkpoint.block_digests, 1, 2)
            assert digests == parts.checkpoint.block_digests(1, 2)

    asyncio.run(asyncio.wait_for(scenario(), 60))


PEER = SimpleNamespace(peer_id="own", dht=None)


def sharer(name: str, **changes: object):
    return server_info(0, 1, name, **{"shares_weights": True, **changes})


def test_those_that_share_but_for_this_peer_and_those_that_leave():
    servers = [
        sharer("a"),
        sharer("own"),
        sharer("left", state=ServerState.OFFLINE),
        sharer("joining", state=ServerState.JOINING),
        server_info(0, 1, "keeps"),
        sharer("b"),
    ]
    assert set(sharers(servers, "own", random.Random(1))) == {"a", "b", "joining"}
    orders = {tuple(sharers(servers, "own", random.Random(seed))) for seed in range(20)}
    assert len(orders) > 1, "not all ask the same peer first"


def test_a_model_that_the_swarm_serves_and_one_that_it_does_not(monkeypatch):
    async def fetch(dht):
        return [ModelInfo(f"model-{number}", 3, "main") for number in range(9)]

    monkeypatch.setattr(peer_model, "fetch_models", fetch)
    assert asyncio.run(find_model(PEER, "model-7")) == ModelInfo("model-7", 3, "main")
    with pytest.raises(WeightsUnavailable, match=r"no server of this swarm serves other.*model-0.*model-4: give"):
        asyncio.run(find_model(PEER, "other"))

    async def none(dht):
        return []

    monkeypatch.setattr(peer_model, "fetch_models", none)
    with pytest.raises(WeightsUnavailable, match=r"cannot be had from peers$"):
        asyncio.run(find_model(PEER, "other"))
