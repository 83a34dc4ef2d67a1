"""Four clients train different adapters on the same servers: none sees another's, and no server's memory grows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.swarms import TestSwarm, run_swarm
from tests.zoo import make_checkpoint

SPANS = ("0:2", "2:3", "3:6")
CLIENTS, STEPS, WARM = 4, 125, 50
BATCH = torch.randint(3, 100, (4, 16), generator=torch.Generator().manual_seed(0))
GROWTH = 8 << 20
"""Bytes that an allocator may keep beyond. The steps that are watched bring 15 to 44 MB of adapters to each server."""


def memory(swarm: TestSwarm) -> list[int]:
    return [psutil.Process(server.pid).memory_info().rss for server in swarm.servers]


def trainer(model: Any) -> Callable[[int], None]:
    """Some steps on one client; every step has an adapter of its own."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(input_ids=BATCH, labels=BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.slow
def test_memory_does_not_grow_over_500_steps_of_four_clients(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "tiny-llama")
    with run_swarm(folder, SPANS, dtype="float32") as swarm, ExitStack() as stack:
        options = {"tuning_mode": "lora", "lora_rank": 64, "target_modules": ["q_proj", "v_proj", "up_proj"]}
        models = [swarm.client(**options) for _ in range(CLIENTS)]
        for model in models:
            stack.enter_context(closing(model.swarm))
        trainers = [trainer(model) for model in models]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda train: train(WARM), trainers))
            before = memory(swarm)
            list(pool.map(lambda train: train(STEPS - WARM), trainers))
        grown = [after - earlier for earlier, after in zip(before, memory(swarm), strict=True)]
    assert max(grown) < GROWTH, f"the servers' memory grew by {grown} bytes"
