"""Blocks with the adapters that the server itself offers."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swarm.data_structures import FlashUse, Span, WireFormat
from swarm.errors import AdapterError
from swarm.metrics.server import ServerObserver
from swarm.models.adapters import adapter_files
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.exits.model_head import ModelHead, head_bytes
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.loading.flash_preparation import plan_for_flash
from swarm.protocol.adapter_encoding import pack_adapters
from swarm.server import span_service as span_service_module
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import token_budget
from swarm.server.config import ExitsOption, ServerConfig
from swarm.server.flash_budget import FlashBudget, flash_footprint
from swarm.server.memory_budget import MemoryBudget
from swarm.server.resolved_config import ResolvedConfig
from swarm.server.sessions.session import SessionTerms
from swarm.server.span_service import SpanService
from swarm.server.throughput.compute_measurement import Throughput
from swarm.server.throughput.throughput_meter import ThroughputMeter
from tests import zoo
from tests.memory_hub import MemoryHub, MemoryNetwork

HIDDEN, SPAN = 32, Span(1, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return open_checkpoint(zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint")))


def save_adapter(folder: Path) -> str:
    """LoRA of all blocks, as PEFT writes it."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(block, "A"): torch.full((2, HIDDEN), 0.1 * block) for block in range(zoo.BLOCKS)}
    tensors |= {name.format(block, "B"): torch.ones(HIDDEN, 2) for block in range(zoo.BLOCKS)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def resolved(checkpoint: Checkpoint, *adapters: str, **options: Any) -> ResolvedConfig:
    return ResolvedConfig(
        options=ServerConfig(throughput=100.0, adapters=adapters, **options),
        checkpoint=checkpoint,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization="none",
        cache_tokens=64,
        adapter_memory=10_000,
        budget=MemoryBudget(memory_footprint(checkpoint, torch.float32), 10**9, 64),
    )


async def load(checkpoint: Checkpoint, *adapters: str, **options: Any) -> SpanService:
    config, compute_thread = resolved(checkpoint, *adapters, **options), ComputeThread()
    try:
        return await SpanService.load(config, SPAN, MemoryNetwork(MemoryHub(), "server"), compute_thread)
    finally:
        compute_thread.close()


def test_a_server_without_exits_offers_none(checkpoint):
    for options in ({}, {"exits": ExitsOption((1, 5))}):
        service = asyncio.run(load(checkpoint, **options))
        assert (service.exits.blocks, service.exits.confidences) == ((), ())
        assert service.model.exits is None


def test_a_session_on_some_blocks_reserves_their_share_of_the_cache(checkpoint):
    """And memory for its last reply: hidden states, which are here what one block takes for a token."""
    sessions = asyncio.run(load(checkpoint)).sessions
    for part, tokens in ((SPAN, 30), (Span(1, 2), 15), (Span(2, 4), 23)):
        assert sessions.tokens_reserved(SessionTerms(b"", "peer", part, 30, WireFormat.NONE)) == tokens


def test_exits_are_offered_where_the_span_has_them(checkpoint):
    service = asyncio.run(load(checkpoint, exits=ExitsOption((1, 2, 4, 5))))
    assert service.exits.blocks == (2, 4)
    assert service.exits.confidences == ("similarity", "softmax")
    assert [piece.span for piece in service.model.pieces()] == [Span(1, 2), Span(2, 3), Span(3, 4)]
    assert isinstance(service.exits.head, ModelHead)
    assert service.exits.head_bytes == head_bytes(checkpoint, torch.float32)


def test_what_the_server_was_started_with_is_found_by_its_digest(checkpoint, tmp_path):
    source = save_adapter(tmp_path)
    service = asyncio.run(load(checkpoint, source))
    parts = adapter_files.read_block_weights(source, checkpoint, SPAN)  # as any client reads it
    blocks, _ = pack_adapters([parts[block] for block in range(SPAN.start, SPAN.end)], torch.float32)
    found = service.adapters.find("anybody", SPAN, [block.digest for block in blocks])
    assert set(found) == {1, 2, 3}
    for block, part in found.items():
        (factors,) = part.factors
        assert factors.module == "self_attn.q_proj"
        torch.testing.assert_close(factors.up @ factors.down, torch.full((HIDDEN, HIDDEN), 2 * 2 * 0.1 * block))
    assert service.adapters.limits.memory == 10_000


def test_an_adapter_that_cannot_be_used_is_told_before_the_weights_are_read(checkpoint, tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(span_service_module, "load_span", never)
    with pytest.raises(AdapterError):
        asyncio.run(load(checkpoint, str(tmp_path / "nothing")))


class Counting(ServerObserver):
    """Remembers what was read from flash."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[FlashUse] = []

    def flash_used(self, use: FlashUse) -> None:
        self.used.append(use)


def test_blocks_on_flash_are_counted_and_let_go_of_when_the_server_leaves(checkpoint, tmp_path):
    planned = plan_for_flash(checkpoint, Span(0, zoo.BLOCKS), torch.float32, tmp_path, exact=False)
    footprint = flash_footprint(checkpoint, torch.float32, planned)
    flash = FlashBudget(footprint, 10**9, 64, 70_000, PackedModel.of(checkpoint, torch.float32, tmp_path))
    config = ResolvedConfig(
        options=ServerConfig(throughput=100.0),
        checkpoint=checkpoint,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization="none",
        cache_tokens=64,
        adapter_memory=10_000,
        budget=flash,
    )
    observer = Counting()

    async def serve() -> SpanService:
        compute_thread = ComputeThread()
        network = MemoryNetwork(MemoryHub(), "server")
        try:
            service = await SpanService.load(config, SPAN, network, compute_thread, observer)
            service.expire()
            service.model.forward(torch.ones(1, 1, HIDDEN))
            service.expire()
            await service.drain(0.0)
        finally:
            compute_thread.close()
        return service

    service = asyncio.run(serve())
    assert service.model.weight_bytes <= 70_000
    assert service.model.strategy.flat is None
    first, second = observer.used
    assert first.read_bytes > 0
    assert 0 < second.read_bytes <= 2 * service.model.flash.record_bytes
    assert not service.sparse
    descriptors = Path("/proc/self/fd")
    opened = [os.readlink(descriptors / name) for name in os.listdir(descriptors) if (descriptors / name).is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_disturbed_measurement_is_repeated_when_others_use_less(checkpoint, monkeypatch):
    found = iter([Throughput(50.0, 500.0, others=0.5), Throughput(200.0, 90_000.0, others=0.1)])
    monkeypatch.setattr(span_service_module, "measure_throughput", lambda model: next(found))
    loaded = asyncio.run(load(checkpoint))
    disturbed = Throughput(100.0, 100.0, others=0.9)
    service = replace(loaded, throughput=ThroughputMeter(disturbed, SPAN.length))

    async def follow(*shares: float) -> list[Throughput]:
        service.engine.compute_thread, announced = ComputeThread(), []
        for share in shares:
            await service.follow_throughput(share)
            announced.append(service.throughput.current)
        service.engine.compute_thread.close()
        return announced

    announced = asyncio.run(follow(0.9, 0.0, 0.0, 0.0))
    assert announced == [disturbed, disturbed, *[Throughput(200.0, 90_000.0, others=0.1)] * 2]
    assert service.engine.budget == token_budget(90_000.0 / SPAN.length)
