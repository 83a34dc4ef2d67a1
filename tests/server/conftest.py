from __future__ import annotations

import pytest

from swarm.models.execution.span_model import SpanModel
from tests.server.conversations import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    """Blocks of a tiny model."""
    return make_model(tmp_path_factory.mktemp("checkpoint"))
