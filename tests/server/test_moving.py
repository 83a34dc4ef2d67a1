"""Servers that move to other blocks, over real libp2p: gaps are closed, sessions go on, memory comes back."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from swarm.data_structures import Mobility, ServerState, Span
from swarm.dht.directory import fetch_servers
from swarm.errors import NotEnoughMemory
from swarm.server.config import BlocksOption, ServerConfig
from swarm.server.lifecycle import Server
from swarm.server.memory_budget import MemoryBudget
from swarm.transport.p2p import P2PConfig
from tests.swarms import run_client, run_swarm
from tests.zoo import BLOCKS, make_checkpoint

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PATIENCE = 60.0
PERIOD = 1.0


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(make_checkpoint("llama", tmp_path / "model"))


async def start(folder: str, blocks: str, peers: tuple[str, ...] = (), **options: Any) -> Server:
    config = ServerConfig(
        model=folder,
        blocks=BlocksOption.parse(blocks),
        p2p=P2PConfig(initial_peers=peers, host_maddrs=LOOPBACK),
        dtype="float32",
        throughput=100.0,
        update_period=PERIOD,
        **options,
    )
    server = Server(config)
    await server.start()
    return server


async def until_online(server: Server, span: Span, observer: Server) -> None:
    """Wait until `observer` sees `server` online at the blocks of `span`."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await fetch_servers(observer.peer.dht, "model", BLOCKS)
            if (server.peer.peer_id, span, ServerState.ONLINE) in [(s.peer_id, s.span, s.state) for s in found]:
                return
            await asyncio.sleep(0.1)


def test_a_gap_is_closed_and_the_old_blocks_leave_memory(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "swarm.server.lifecycle")

    async def scenario() -> None:
        keeper = await start(folder, "0:4")
        address = await keeper.peer.visible_addresses()
        tail = await start(folder, "4:6", address)
        spare = await start(folder, "2", address)
        assert spare.span is not None
        assert spare.span != Span(4, 6)
        assert spare._service is not None
        blocks = weakref.ref(spare._service.model)
        caplog.clear()  # of what `tail` said
        await tail.stop()
        await until_online(spare, Span(4, 6), keeper)
        gc.collect()
        assert blocks() is None
        async with asyncio.timeout(PATIENCE):
            while "Ready: serving blocks 4:6 of model" not in caplog.text:
                await asyncio.sleep(0.01)
        await spare.stop()
        await keeper.stop()

    uvloop.run(scenario())


def test_blocks_that_do_not_fit_here_are_left_to_others(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out before the sessions are sent away, and announced, so that no other server waits for this one."""
    caplog.set_level(logging.INFO, "swarm.server.lifecycle")
    check_fits = MemoryBudget.check_fits

    def check(budget: MemoryBudget, span: Span) -> None:
        if span == Span(4, 6):
            raise NotEnoughMemory("too little for blocks 4:6")
        check_fits(budget, span)

    async def scenario() -> None:
        keeper = await start(folder, "0:4")
        address = await keeper.peer.visible_addresses()
        tail = await start(folder, "4:6", address)
        spare = await start(folder, "2", address)
        home, service = spare.span, spare._service
        monkeypatch.setattr(MemoryBudget, "check_fits", check)
        await tail.stop()
        async with asyncio.timeout(PATIENCE):
            while f"Staying at blocks {home}: too little for blocks 4:6" not in caplog.text:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE):
            while spare._move_loop.mobility is not Mobility.PINNED:
                await asyncio.sleep(0.01)
        assert spare.span == home
        assert spare._service is service
        await spare.stop()
        await keeper.stop()

    uvloop.run(scenario())


@pytest.mark.slow
def test_a_session_goes_on_while_its_server_moves(tmp_path: Path) -> None:
    """The only tail server of a session is killed; the spare that serves the session's head moves there."""
    folder = make_checkpoint("llama", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.randint(3, 100, (1, 7), generator=torch.Generator().manual_seed(3))
    expected = local.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    # So slow that a route goes through the spare, whatever a busy machine makes of their round trips.
    slow_head = 1.0
    with run_swarm(folder, ["0:4"], dtype="float32", update_period=PERIOD, throughput=slow_head) as swarm:
        tail = swarm.start("4:6", dtype="float32", update_period=PERIOD).wait_ready()
        spare = swarm.start("4", dtype="float32", update_period=PERIOD, stay=False, throughput=1e6).wait_ready()
        with run_client(swarm, dtype="float32") as model:
            with model.inference_session(max_length=64) as session:
                half = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
                before = [hop.server.peer_id for hop in session.route.hops]
                assert spare.peer_id in before
                tail.kill()
                written = model.generate(half, max_new_tokens=12, do_sample=False, pad_token_id=0)
                after = {hop.server.peer_id: hop.span for hop in session.route.hops}
                assert tail.peer_id not in after
                assert after[spare.peer_id].end == 6
        assert written.tolist() == expected.tolist()
