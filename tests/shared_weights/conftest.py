"""What several modules of these tests share."""

from __future__ import annotations

import pytest

from swarm.shared_weights.checkpoint_parts import CheckpointParts
from tests.shared_weights.peers import make_checkpoint


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Those of a small model, with their digests. Modules that need others have a fixture of this name."""
    found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("model") / "model"))
    found.manifests()
    return found


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other weights of the same revision."""
    found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("other") / "model", seed=1))
    found.manifests()
    return found
