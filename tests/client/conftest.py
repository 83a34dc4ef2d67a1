"""A tiny model for the tests of chains."""

from __future__ import annotations

import pytest
import torch

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.span_loading import load_span
from tests import zoo


@pytest.fixture(scope="session")
def span_model(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    """All six blocks of a tiny llama."""
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    return load_span(open_checkpoint(folder), Span(0, zoo.BLOCKS), dtype=torch.float32, device=torch.device("cpu"))
