"""Peers in memory that share a small checkpoint, honestly or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import FetchProgress, fetch_parts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.manifest import all_parts
from swarm.shared_weights.part_store import PartStore
from swarm.shared_weights.trust import TrustedParts
from swarm.transport.stream import Stream
from tests import virtual_time
from tests.memory_hub import MemoryHub

BLOCKS = 3
NAME = "some/model"
PARTS = all_parts(BLOCKS)


def make_checkpoint(folder: Path, hidden: int = 16, seed: int = 0, vocabulary: int = 50) -> Checkpoint:
    """A llama of random weights. With `hidden` of 600 or more, tensors have several chunks."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config.save_pretrained(folder)
    tensors = {"model.embed_tokens.weight": torch.randn(vocabulary, hidden), "model.norm.weight": torch.randn(hidden)}
    tensors["lm_head.weight"] = torch.randn(vocabulary, hidden)
    for block in range(BLOCKS):
        prefix = f"model.layers.{block}."
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = torch.randn(hidden, hidden)
        tensors[f"{prefix}mlp.gate_proj.weight"] = torch.randn(2 * hidden, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = torch.randn(2 * hidden, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.randn(hidden, 2 * hidden)
        tensors[f"{prefix}input_layernorm.weight"] = torch.randn(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = torch.randn(hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(folder, name=NAME)


class Swarm:
    """Holders of a network in memory, and what was asked of each."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.holders: list[str] = []

    async def add(self, name: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """A peer that answers requests for weights with `handler`."""
        await self.hub.serve(name, handler)
        self.holders.append(name)

    async def add_holder(self, name: str, parts: CheckpointParts) -> WeightsHolder:
        """An honest holder that knows the digests of its parts."""
        holder = WeightsHolder(parts)
        await holder.prepare()
        await self.add(name, holder.serve)
        return holder

    async def find(self) -> Sequence[str]:
        return tuple(self.holders)

    async def fetch(
        self,
        store: PartStore,
        parts: Sequence[str],
        on_progress: Callable[[FetchProgress], object] = lambda progress: None,
        liars: set[str] | None = None,
    ) -> None:
        """`fetch_parts` as a peer of this network."""

        async def open_stream(peer: str) -> Stream:
            return await self.hub.connect("receiver", peer)

        await fetch_parts(open_stream, self.find, store, parts, on_progress, liars)


@asynccontextmanager
async def network():
    """A `Swarm`; all its handlers end with it."""
    hub = MemoryHub()
    try:
        yield Swarm(hub)
    finally:
        await hub.close()


def run(scenario: Awaitable[None]) -> None:
    """Run a test's scenario in a loop of its own."""
    asyncio.run(asyncio.wait_for(scenario, 60))


async def silent(stream):
    await stream.discard_incoming()


def with_peers(scenario, **handlers) -> float:
    """Run a scenario with a way to open streams, and one to find the peers; how long it took."""
    took: list[float] = []

    async def whole() -> None:
        async with network() as swarm:
            for name, handler in handlers.items():
                await swarm.add(name, handler)
            began = time.monotonic()
            await scenario(lambda peer: swarm.hub.connect("receiver", peer), swarm.find)
            took.append(time.monotonic() - began)

    virtual_time.run(whole)
    return took[0]


def trusted(parts: CheckpointParts, names=PARTS) -> TrustedParts:
    digests = parts.manifests().digests
    return TrustedParts(parts.checkpoint.revision, BLOCKS, {name: digests[name] for name in names})
