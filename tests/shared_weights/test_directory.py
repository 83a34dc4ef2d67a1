from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from swarm.data_structures import ModelInfo, ServerState
from swarm.errors import DhtError, WeightsUnavailable
from swarm.shared_weights import directory
from swarm.shared_weights.directory import REFRESH_S, SharersOfModel, find_model, sharers
from tests import virtual_time
from tests.infos import server_info

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


def test_the_dht_is_asked_every_ten_seconds_or_while_it_knows_none(monkeypatch):
    asked, answers = [], [[], [sharer("a")], [sharer("b")], DhtError("no answer")]

    async def fetch(dht, model, blocks):
        asked.append((model, blocks))
        answer = answers.pop(0)
        if isinstance(answer, DhtError):
            raise answer
        return answer

    monkeypatch.setattr(directory, "fetch_servers", fetch)

    async def scenario() -> None:
        found = SharersOfModel(PEER, "model", 3)
        assert await found.find() == []
        assert await found.find() == ["a"]
        assert await found.find() == ["a"]
        await asyncio.sleep(REFRESH_S)
        assert await found.find() == ["b"]
        await asyncio.sleep(REFRESH_S)
        assert await found.find() == ["b"], "those that were known before"

    virtual_time.run(scenario)
    assert asked == [("model", 3)] * 4


def test_a_model_that_the_swarm_serves_and_one_that_it_does_not(monkeypatch):
    async def fetch(dht):
        return [ModelInfo(f"model-{number}", 3, "main") for number in range(9)]

    monkeypatch.setattr(directory, "fetch_models", fetch)
    assert asyncio.run(find_model(PEER, "model-7")) == ModelInfo("model-7", 3, "main")
    with pytest.raises(WeightsUnavailable, match=r"no server of this swarm serves other.*model-0.*model-4: give"):
        asyncio.run(find_model(PEER, "other"))

    async def none(dht):
        return []

    monkeypatch.setattr(directory, "fetch_models", none)
    with pytest.raises(WeightsUnavailable, match=r"cannot be had from peers$"):
        asyncio.run(find_model(PEER, "other"))
