"""A tiny model for the tests of the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo


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
