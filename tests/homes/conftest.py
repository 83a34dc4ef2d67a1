"""Swarms in the laboratory for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.homes.processes import HomesSwarm, run_homes


@pytest.fixture
def homes() -> Iterator[HomesSwarm]:
    """An Internet of namespaces, and a swarm of the demo model without any peers so far."""
    with run_homes(DEMO_FOLDER) as running:
        yield running
