"""Four clients train different adapters on the same servers: none sees another's, and no server's memory grows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.swarms import TestSwarm, run_swarm
from tests.zoo import BLOCKS, make_checkpoint

SPANS = ("0:2", "2:3", "3:6")
CLIENTS, WARM, WINDOWS, STEPS = 4, 36, 3, 8
BATCH = torch.randint(3, 100, (4, 16), generator=torch.Generator().manual_seed(0))


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
def test_memory_does_not_grow_while_four_clients_train(tmp_path: Path) -> None:
    """Whatever is kept of each step adds up in every window; what an allocator keeps beyond does so in some."""
    folder = make_checkpoint("llama", tmp_path / "tiny-llama")
    with run_swarm(folder, SPANS, dtype="float32") as swarm, ExitStack() as stack:
        options = {"tuning_mode": "lora", "lora_rank": 64, "target_modules": ["q_proj", "v_proj", "up_proj"]}
        models = [swarm.client(**options) for _ in range(CLIENTS)]
        for model in models:
            stack.enter_context(closing(model.swarm))
        block_adapter = sum(one.nbytes for one in models[0].parameters() if one.requires_grad) / BLOCKS
        trainers = [trainer(model) for model in models]
        seen = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            for steps in (WARM, *[STEPS] * WINDOWS):
                list(pool.map(lambda train, steps=steps: train(steps), trainers))
                seen.append(memory(swarm))
    grown = [[after - before for before, after in pairwise(server)] for server in zip(*seen, strict=True)]
    most = max(map(statistics.median, grown)) / (CLIENTS * STEPS)
    assert most < block_adapter / 2, f"a step adds {most:.0f} bytes, and a block's adapter has {block_adapter:.0f}"
