"""Whole servers in this process, over real libp2p: nothing is global, so many peers can share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import ServerState, Span, StepLayout, WireFormat
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import InvalidSpan, SwarmError
from swarm.models.execution.span_model import SpanModel
from swarm.server.config import BlocksOption, ServerConfig
from swarm.server.lifecycle import Server
from swarm.transport.p2p import P2PConfig, Peer
from tests.client.chains import RoutingPlanner
from tests.waiting import wait_until
from tests.zoo import BLOCKS, make_checkpoint

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def run(work: Coroutine[Any, Any, None]) -> None:
    uvloop.run(work)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(make_checkpoint("llama", tmp_path / "model"))


def server(folder: str, blocks: str, peers: tuple[str, ...] = (), **options: Any) -> Server:
    p2p = P2PConfig(initial_peers=peers, host_maddrs=LOOPBACK)
    return Server(ServerConfig(model=folder, blocks=BlocksOption.parse(blocks), p2p=p2p, dtype="float32", **options))


async def client_of(first: Server) -> Peer:
    return await Peer.create(P2PConfig(initial_peers=await first.peer.visible_addresses()), AnnouncementValidator())


def hidden_states(tokens: int) -> PackedHidden:
    values = torch.randn(tokens, 32).numpy().tobytes()
    return PackedHidden(values, tokens, 32, WireFormat.NONE, "float32")


def test_three_servers_of_one_process_spread_over_the_blocks(folder: str) -> None:
    async def scenario() -> None:
        servers = [server(folder, "2", throughput=100.0)]
        await servers[0].start()
        address = await servers[0].peer.visible_addresses()
        for _ in range(2):
            servers.append(server(folder, "2", address, throughput=100.0))
            await servers[-1].start()
        client = await client_of(servers[0])
        found = await fetch_servers(client.dht, "model", BLOCKS)
        assert {info.peer_id for info in found} == {each.peer.peer_id for each in servers}
        assert {block for info in found for block in range(info.span.start, info.span.end)} == set(range(BLOCKS))
        assert all(info.state is ServerState.ONLINE and len(info.digests) == 2 for info in found)
        await servers[0].stop()
        # The others know it at once, not when the record expires.
        found = await fetch_servers(client.dht, "model", BLOCKS)
        assert [info.state for info in found if info.peer_id == servers[0].peer.peer_id] == [ServerState.OFFLINE]
        for each in servers[1:]:
            await each.stop()
        await client.shutdown()

    run(scenario())


def test_a_leaving_server_finishes_the_running_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    forward = SpanModel.forward_tokens

    def slow(self: SpanModel, *args: Any, **kwargs: Any) -> torch.Tensor:
        began.set()
        assert go_on.wait(60)
        return forward(self, *args, **kwargs)

    async def scenario() -> None:
        only = server(folder, "0:6", throughput=100.0)
        await only.start()
        client = await client_of(only)
        [info] = await fetch_servers(client.dht, "model", BLOCKS)
        announced = [info]
        planner = RoutingPlanner(lambda: announced, missing_blocks_timeout=0.0)
        chain = Chain(
            SessionContext(client, planner, RequestOptions(info.revision, WireFormat.NONE, 20), Span(0, 6), 16)
        )
        await chain.open()
        monkeypatch.setattr(SpanModel, "forward_tokens", slow)
        step = asyncio.create_task(chain.step(hidden_states(3), StepLayout((0,), (3,))))
        await asyncio.to_thread(wait_until, began.is_set)
        leaving = asyncio.create_task(only.stop())
        [info] = await fetch_servers(client.dht, "model", BLOCKS)
        while info.state is not ServerState.OFFLINE:
            [info] = await fetch_servers(client.dht, "model", BLOCKS)
        go_on.set()
        assert (await step).tokens == 3
        announced.clear()
        with pytest.raises(SwarmError, match="blocks 0:6"):  # there is nobody else
            await chain.step(hidden_states(1), StepLayout((3,), (1,)))
        await leaving
        await client.shutdown()

    run(scenario())


def test_a_start_that_fails_leaves_nothing_behind(folder: str) -> None:
    async def scenario() -> None:
        wrong = server(folder, "5:9")
        with pytest.raises(InvalidSpan):
            await wrong.start()
        first = server(folder, "0:6", throughput=100.0)
        await first.start()
        late = server(folder, "9", await first.peer.visible_addresses())
        with pytest.raises(InvalidSpan, match="the model has 6 blocks"):
            await late.start()
        await first.stop()

    run(scenario())
