"""A tiny model for the tests of the client, and a swarm of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.speculation import guess_policy
from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.swarms import TestSwarm, run_client, run_swarm

SPANS = ("0:2", "2:3", "3:6")
"""Of the servers of `swarm`."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny llama with six blocks."""
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def local(folder: Path) -> Any:
    """The same as transformers computes it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def span_model(folder: Path) -> SpanModel:
    """All six blocks of it as a server has them."""
    return load_span(open_checkpoint(folder), Span(0, zoo.BLOCKS), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def always_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts guess, whether or not it pays: with servers as near as those of tests it hardly does."""
    monkeypatch.setattr(guess_policy, "MIN_CHANCE", 0.0)
    monkeypatch.setattr(guess_policy, "MAX_CHANCE", 0.0)
    monkeypatch.setattr(
        guess_policy.Pace, "guesses", property(lambda pace: True, lambda pace, value: None), raising=False
    )


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Three servers of it."""
    with run_swarm(folder, SPANS, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    """A client of them."""
    with run_client(swarm, dtype="float32") as model:
        yield model
