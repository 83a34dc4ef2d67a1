"""Servers and clients that get a model's weights from servers, over real libp2p, without a hub."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from swarm.client.config import NetworkOptions
from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.data_structures import Span
from swarm.errors import HubUnreachable
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import encode_digest_file, known_digests
from swarm.server.config import BlocksOption, ServerConfig, WeightsOption
from swarm.server.lifecycle import Server
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.transport.p2p import P2PConfig
from tests.zoo import BLOCKS, make_checkpoint

NAME = "friends/model"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "model")


@pytest.fixture
def digests(folder: Path, tmp_path: Path) -> Path:
    """What `swarm digest --for-peers` writes."""
    checkpoint = open_checkpoint(folder, name=NAME)
    known = known_digests(checkpoint).by_block
    parts = CheckpointParts(checkpoint).manifests().digests
    path = tmp_path / "digests.json"
    path.write_bytes(encode_digest_file(NAME, checkpoint.revision, [known[one] for one in range(BLOCKS)], parts))
    return path


@asynccontextmanager
async def serving(weights: WeightsOption, blocks: str, peers: tuple[str, ...] = (), cache_dir: Path | None = None):
    server = Server(
        ServerConfig(
            model=NAME,
            blocks=BlocksOption.parse(blocks),
            p2p=P2PConfig(initial_peers=peers, host_maddrs=LOOPBACK),
            dtype="float32",
            throughput=100.0,
            update_period=1.0,
            weights=weights,
            cache_dir=cache_dir,
        )
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def addresses_of(server: Server) -> tuple[str, ...]:
    return await server.peer.visible_addresses()


async def until_shared(server: Server) -> None:
    """Wait until the server knows the digests of what it shares."""
    assert server._sharing is not None
    preparing = server._sharing._preparing
    assert preparing is not None
    await preparing


def test_a_server_and_a_client_need_nothing_but_an_address(folder, digests, tmp_path):
    """A server and a client that have no file of the model: their tokens are those of the local model."""
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = local.generate(ids, max_new_tokens=8, do_sample=False)

    async def scenario() -> torch.Tensor:
        source = WeightsOption(source=str(folder), share=True)
        async with serving(source, "0:2") as holder:
            await until_shared(holder)
            peers = await addresses_of(holder)
            there = WeightsOption(source="peers", digests=digests)
            async with serving(there, f"2:{BLOCKS}", peers, tmp_path / "server"):

                def generate() -> torch.Tensor:
                    model = AutoDistributedModelForCausalLM.from_pretrained(
                        NAME,
                        initial_peers=peers,
                        weights_from="peers",
                        wire="none",
                        cache_dir=tmp_path / "client",
                        network=NetworkOptions(digests=digests),
                    )
                    try:
                        return model.generate(ids, max_new_tokens=8, do_sample=False)
                    finally:
                        model.swarm.close()

                return await asyncio.to_thread(generate)

    assert torch.equal(uvloop.run(scenario()), expected)
    received = [path.name for path in (tmp_path / "client").rglob("*.safetensors")]
    assert received == ["client.safetensors"], "no block was sent to the client"


def test_a_server_moves_to_a_gap_without_a_hub(folder, digests, tmp_path):
    async def scenario() -> None:
        async with serving(WeightsOption(source=str(folder), share=True), "0:1") as holder:
            await until_shared(holder)
            peers = await addresses_of(holder)
            there = WeightsOption(source="peers", digests=digests)
            async with serving(there, "1", peers, tmp_path / "server") as mover:
                assert mover.span == Span(1, 2)
                async with asyncio.timeout(60):
                    moved = await mover._move(_config(mover), Span(3, 4), closes_gap=True)
                assert moved
                assert mover.span == Span(3, 4)

    uvloop.run(scenario())


def _config(server: Server):
    from swarm.server.resolved_config import resolve_config

    assert server._weights is not None
    return resolve_config(server.config, server._weights.checkpoint)


def test_the_hub_is_asked_first_and_peers_where_it_cannot_be_reached(folder, digests, tmp_path):
    async def scenario() -> None:
        async with serving(WeightsOption(source=str(folder), share=True), "0:2") as holder:
            await until_shared(holder)
            peers = await addresses_of(holder)
            async with serving(WeightsOption("auto", digests), "3:4", peers, tmp_path / "a") as server:
                assert server.span == Span(3, 4)
            with pytest.raises(HubUnreachable):
                async with serving(WeightsOption("hub", digests), "3:4", peers, tmp_path / "c"):
                    pass

    uvloop.run(scenario())
