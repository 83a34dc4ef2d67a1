"""A gateway of a real three-server swarm, for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.metrics.endpoint import MetricsAddress
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.gateway.scripts import MODEL, SCRIPTS, TEMPLATE
from tests.gateways import GatewayProcess, run_gateway
from tests.scripted import make_scripted
from tests.swarms import TestSwarm, run_swarm


@pytest.fixture(scope="session")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, ("0:4", "4:8", "8:12"), metrics=MetricsAddress("127.0.0.1", 0)) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(swarm: TestSwarm) -> Iterator[GatewayProcess]:
    with run_gateway(swarm) as running:
        yield running


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway of a real swarm whose model gives known answers."""
    folder = make_scripted(tmp_path_factory.mktemp("model") / MODEL, SCRIPTS, TEMPLATE)
    with run_swarm(folder, ("0:2", "2:4", "4:6")) as swarm, run_gateway(swarm) as gateway:
        yield gateway
