"""How many more tokens several lanes write: real servers, real chains, on a clock that only delays and computing move.

The servers and the delays are those of `tests.test_push_delay`. A lane alone keeps every server waiting while its token
travels; lanes side by side fill that time (MDI-LLM, section III-C).
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.data_structures import Span, WireFormat
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.memory_hub import MemoryNetwork
from tests.test_push_delay import CPU, DELAY, PROMPT, Swarm, run

SERVERS, TOKENS = 3, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def whole(folder: Path, local: Any) -> SpanModel:
    return load_span(open_checkpoint(folder), Span(0, zoo.BLOCKS), dtype=local.dtype, device=CPU)


async def tokens_a_second(swarm: Swarm, lanes: int) -> float:
    """Of all lanes together, after their prompts."""
    loop = asyncio.get_running_loop()
    sides = []
    for _ in range(lanes):
        side = copy.copy(swarm)
        manner = RequestOptions("main", WireFormat.NONE, 60.0)
        side.chain = Chain(
            SessionContext(MemoryNetwork(swarm.hub, "client"), swarm.planner, manner, Span(0, zoo.BLOCKS), 64)
        )
        await side.chain.open()
        sides.append(side)
    firsts = [await side.feed(list(PROMPT)) for side in sides]
    began = loop.time()

    async def write(side: Swarm, token: int) -> None:
        for _ in range(TOKENS):
            token = await side.feed([token])

    await asyncio.gather(*(write(side, token) for side, token in zip(sides, firsts, strict=True)))
    seconds = loop.time() - began
    for side in sides:
        await side.chain.close()
    return lanes * TOKENS / seconds


@pytest.mark.parametrize(("lanes", "judged"), [(3, 2.8), (6, 5.4)])
def test_lanes_use_the_time_in_which_others_travel(whole: SpanModel, local: Any, lanes: int, judged: float) -> None:
    async def scenario(swarm: Swarm) -> None:
        one = await tokens_a_second(swarm, 1)
        assert one == pytest.approx(1 / ((SERVERS + 1) * DELAY))
        assert await tokens_a_second(swarm, lanes) >= judged * one
        assert swarm.planner.failures == []

    run(lambda: Swarm(whole, local, SERVERS), scenario)
