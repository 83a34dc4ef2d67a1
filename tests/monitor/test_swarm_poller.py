from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo
from swarm.dht.announcer import Announcer
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerUnreachable
from swarm.monitor import swarm_poller
from swarm.monitor.swarm_poller import (
    EMPTY_POLLS_BEFORE_REJOIN,
    MAX_BLOCKS,
    MAX_MODELS,
    REJOIN_AFTER_S,
    DhtSource,
    PollResult,
    SwarmPoller,
    select_models,
)
from swarm.monitor.swarm_view import SwarmView
from swarm.transport.p2p import P2PConfig, Peer
from tests.infos import server_info
from tests.monitor.sources import DescribedSwarm, found

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")
MODEL = ModelInfo("org/model", 4, "main")


@pytest.fixture(autouse=True)
def _collect():
    yield
    gc.collect()  # while this module's filter holds


infos = st.builds(ModelInfo, st.text("abcdef", min_size=1, max_size=1), st.integers(1, 2048), st.just("main"))
lists = st.lists(infos, max_size=6, unique_by=lambda info: info.name)


@given(lists, lists, st.lists(st.text("abcdef", min_size=1, max_size=1), max_size=4))
def test_what_is_looked_at_is_bounded_and_nothing_is_lost(listed, remembered, wanted):
    taken, absent, left_out = select_models(listed, remembered, wanted)
    known = {info.name for info in (*listed, *remembered)}
    assert sum(info.blocks for info in taken) <= MAX_BLOCKS
    assert len({info.name for info in taken}) == len(taken)
    assert all(info in listed for info in taken if info.name in {one.name for one in listed})
    if wanted:
        assert {info.name for info in taken} <= set(wanted)
        assert set(absent) == set(wanted) - known
    assert len(taken) + left_out == len(known & set(wanted) if wanted else known)


def test_a_flood_of_names_does_not_take_the_place_of_models_that_many_serve():
    listed = [ModelInfo("real", 100, "main"), *(ModelInfo(f"fake{n}", 2000, "main") for n in range(500))]
    taken, _, left_out = select_models(listed, (), ())
    assert taken[0].name == "real"
    assert sum(info.blocks for info in taken) <= MAX_BLOCKS
    assert left_out == 501 - len(taken)
    small = [ModelInfo(f"fake{n}", 1, "main") for n in range(500)]
    assert len(select_models(small, (), ())[0]) == MAX_MODELS
    # Who names his models is not bothered at all.
    assert select_models(listed, (), ["real"]) == ([listed[0]], (), 0)


def test_it_finds_servers_by_the_dht_alone_and_comes_back_after_its_daemon_died():
    async def scenario() -> None:
        peer = await Peer.create(P2PConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)), AnnouncementValidator())
        info = server_info(0, 4, peer.peer_id)
        clock = [0.0]
        source = DhtSource(await peer.visible_addresses(), clock=lambda: clock[0])
        try:
            assert await source.poll() == PollResult(())
            first = source._peer
            # Nothing to be seen: after a while it joins anew, as it may have lost everybody it knew.
            for _ in range(EMPTY_POLLS_BEFORE_REJOIN):
                await source.poll()
            assert source._peer is first
            clock[0] += REJOIN_AFTER_S
            await source.poll()
            second = source._peer
            assert second is not first

            assert await Announcer(peer, MODEL, lambda: info, 60.0).announce()
            assert await source.poll() == PollResult((found(4, info),))
            assert await source.round_trips([peer.peer_id]) == {}  # it serves no streams
            assert second is not None
            second._p2p._child.kill()
            assert source._lost is not None
            await source._lost
            assert await source.poll() == PollResult((found(4, info),))
            assert source._peer is not second
        finally:
            await source.close()
            await peer.shutdown()

    uvloop.run(scenario())


LOOPBACK = "/ip4/127.0.0.1/tcp/1/p2p/QmPeer"
PATIENCE = 60.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def poller_of(source: DescribedSwarm, period: float = 0.01, **options: Any) -> SwarmPoller:
    return SwarmPoller((LOOPBACK,), period=period, source=source, **options)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_it_looks_again_and_again():
    async def scenario() -> None:
        swarm = DescribedSwarm(found(4, server_info(0, 4, "one")), trips={"one": 0.02})
        poller = poller_of(swarm)
        await poller.start()
        await poller.was_read.wait()
        # It is shown before it is measured.
        await until(lambda: poller.latest.models[0].servers[0].round_trip is not None)
        seen = poller.latest
        assert seen.models[0].servers[0].round_trip == 0.02
        assert msgspec.json.decode(msgspec.json.encode(seen), type=SwarmView) == seen
        swarm.found = (found(4, server_info(0, 2, "one")),)
        await until(lambda: not poller.latest.models[0].complete)
        assert poller.latest.models[0].missing[0].start == 2
        assert poller.history.models["org/model"].points[-1].covered == 2
        await poller.stop()
        assert swarm.closed

    run(scenario())


def test_a_swarm_that_cannot_be_reached_is_tried_again_and_what_was_seen_stays(caplog):
    async def scenario() -> None:
        swarm = DescribedSwarm(found(4, server_info(0, 4)))
        swarm.error = PeerUnreachable("none of the initial peers answered")
        poller = poller_of(swarm)
        await poller.start()
        await poller.was_read.wait()
        assert (poller.latest.problem, poller.latest.models) == ("none of the initial peers answered", ())
        swarm.error = None
        await until(lambda: not poller.latest.problem)
        assert poller.latest.models[0].complete
        swarm.error = RuntimeError("something new")
        await until(lambda: poller.latest.problem)
        assert "something new" in poller.latest.problem
        assert poller.latest.models[0].complete
        await poller.stop()

    run(scenario())
    assert "none of the initial peers answered; trying again" in caplog.text


def test_models_are_remembered_for_a_while_after_their_last_server():
    async def scenario() -> None:
        clock = [1e9]
        swarm = DescribedSwarm(found(4, server_info(0, 4)), found(2, name="org/never-served"))
        poller = poller_of(swarm, now=lambda: clock[0])
        await poller.poll()
        await poller.poll()
        assert [info.name for info in swarm.remembered] == ["org/model"]
        swarm.found = (found(4),)
        clock[0] += swarm_poller.MODEL_RETENTION_S - 1
        assert not (await poller.poll()).models[0].complete
        assert [info.name for info in swarm.remembered] == ["org/model"]
        clock[0] += 2
        await poller.poll()
        assert swarm.remembered == []

    run(scenario())


def test_the_page_does_not_tell_others_this_machines_own_addresses():
    async def scenario() -> None:
        public = "/ip4/8.8.8.8/tcp/31337/p2p/QmPeer"
        for peers, address in (((LOOPBACK,), "ADDRESS"), ((LOOPBACK, public), public)):
            poller = SwarmPoller(peers, source=DescribedSwarm(found(4)))
            view = await poller.poll()
            assert view.models[0].missing[0].command == f"swarm server org/model --blocks 0:4 --initial-peers {address}"

    run(scenario())
