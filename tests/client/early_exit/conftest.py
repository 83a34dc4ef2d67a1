"""Servers and a client for the tests of early exit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.client.early_exit import look_meter
from tests.swarms import TestSwarm, run_client, run_swarm

SPANS = ("0:2", "2:3", "3:6")


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Three servers of the tiny llama."""
    with run_swarm(folder, SPANS, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    """A client of them."""
    with run_client(swarm, dtype="float32") as model:
        yield model


@pytest.fixture
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens on their way are looked at also where servers are so near that it is not worth it."""
    monkeypatch.setattr(look_meter, "MIN_GAIN", 0.0)
