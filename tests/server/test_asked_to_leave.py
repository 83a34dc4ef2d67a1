"""Clients whose sessions were asked to leave, on real servers: their texts go on, elsewhere or where they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.session import InferenceSession
from tests import zoo
from tests.disturbances import greedy, write
from tests.swarms import TestSwarm, run_client, run_swarm

pytestmark = pytest.mark.slow

CACHE_TOKENS = 128
NEW = 91
"""With the prompt, three quarters of the cache: all that one peer may have, and more than its share."""

OTHERS, OTHER_TOKENS = 3, 16
"""How many peers come, and what each wants: its share, and together more than the quarter that is left."""

PROMPT = torch.tensor([zoo.PROMPTS[0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder) -> list[int]:
    return greedy(AutoModelForCausalLM.from_pretrained(folder), PROMPT, NEW)


@pytest.fixture
def others() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def comes(swarm: TestSwarm, others: ExitStack) -> Any:
    """Other clients open sessions where this one's is, and keep them."""

    def event(session: InferenceSession) -> None:
        assert session.route is not None
        server = session.route.hops[0].server.peer_id
        for _ in range(OTHERS):
            model = others.enter_context(run_client(swarm, allowed_servers=(server,)))
            others.enter_context(model.inference_session(max_length=OTHER_TOKENS)).open()

    return event


def run(folder: Path, servers: int) -> Any:
    blocks = [f"0:{zoo.BLOCKS}"] * servers
    return run_swarm(folder, blocks, dtype="float32", cache_tokens=CACHE_TOKENS)


def test_a_session_that_was_asked_to_leave_goes_on_elsewhere(folder, expected, others):
    with run(folder, 2) as swarm, run_client(swarm) as model, others:
        used: list[str] = []

        def note(session: InferenceSession) -> None:
            assert session.route is not None
            used.append(session.route.hops[0].server.peer_id)

        assert write(model, PROMPT, NEW, {30: note, 40: comes(swarm, others), NEW: note}) == expected
        assert used[0] != used[1]
