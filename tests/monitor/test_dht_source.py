from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo, ServerState
from swarm.dht.announcer import Announcer
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerUnreachable
from swarm.monitor.dht_source import (
    EMPTY_POLLS_BEFORE_REJOIN,
    MAX_BLOCKS,
    MAX_MODELS,
    REJOIN_AFTER_S,
    DhtSource,
    PollResult,
    peers_to_ping,
    select_models,
)
from swarm.transport.p2p import P2PConfig, Peer
from tests.infos import server_info
from tests.monitor.sources import found

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


def test_models_that_nobody_names_any_more_are_looked_at_too():
    listed, gone = ModelInfo("now", 3, "main"), ModelInfo("gone", 4, "main")
    assert select_models([listed], [gone, ModelInfo("now", 3, "old")], ()) == ([listed, gone], (), 0)


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


def test_a_swarm_that_is_not_there():
    async def scenario() -> None:
        peer = await Peer.create(P2PConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)), AnnouncementValidator())
        addresses = await peer.visible_addresses()
        await peer.shutdown()
        source = DhtSource(addresses)
        with pytest.raises(PeerUnreachable):
            await source.poll()
        await source.close()

    uvloop.run(scenario())


def test_who_is_worth_a_ping():
    here, gone = server_info(0, 1, "here"), replace(server_info(0, 1, "gone"), state=ServerState.OFFLINE)
    assert peers_to_ping(PollResult((found(1, here, gone),))) == ["here"]
