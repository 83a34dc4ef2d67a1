"""Sequences without a model, whose events the test gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.generation.early_exits import ExitCounts
from swarm.generation.sequence_generation import SequenceEvent
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.sequence_request import SequenceRequest
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import new_registry


class FakeGeneration:
    """Stands in for a generation. With a prompt `[n]`, `start` fails unless n is above 0."""

    tokens = cached_tokens = thought_tokens = 0

    def __init__(
        self,
        served: Any,
        request: SequenceRequest,
        on_event: Callable[[SequenceEvent], None],
        owner: str,
        on_prompt: Any,
    ) -> None:
        self.request, self.on_prompt = request, on_prompt
        self.works = request.prompt[0] > 0
        self.on_event = on_event
        self.exits: ExitCounts = Counter()
        self.guesses: Counter[tuple[str, bool]] = Counter()
        self.running = False

    def start(self) -> None:
        if not self.works:
            raise RuntimeError("can't start new thread")
        self.running = True

    def cancel(self) -> None:
        self.running = False

    async def wait_ended(self) -> None:
        assert self.works


@pytest.fixture
def make_group(monkeypatch):
    monkeypatch.setattr("swarm.generation.sequence_group.SequenceGeneration", FakeGeneration)

    def make(*prompts: int | list[int]) -> SequenceGroup:
        served: Any = SimpleNamespace(name="m")
        texts = [[prompt] if isinstance(prompt, int) else prompt for prompt in prompts]
        requests = [SequenceRequest(prompt=text, limit=1) for text in texts]
        return SequenceGroup(served, requests, 1, 0.0, GatewayMetrics(new_registry()))

    return make
