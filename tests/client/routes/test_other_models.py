"""A client whose model nobody serves learns which models the swarm has."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import MissingBlocks
from tests import zoo
from tests.swarms import run_client, run_swarm
from tests.waiting import wait_until


def test_models_of_another_name_or_size_and_servers_that_have_left(tmp_path: Path) -> None:
    alpha, beta = zoo.make_checkpoint("llama", tmp_path / "alpha"), tmp_path / "beta"
    shutil.copytree(alpha, beta)
    shorter = shutil.copytree(alpha, tmp_path / "shorter" / "alpha")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))

    def refusal() -> str:
        with run_client(swarm, wait_for_blocks=0.0) as model, pytest.raises(MissingBlocks) as caught:
            zoo.greedy_texts(model)
        return str(caught.value)

    with run_swarm(alpha, ["0:6"]) as swarm:
        swarm.model = str(shorter)
        assert "it serves alpha with 6 blocks, not 5" in refusal()
        swarm.model = str(beta)
        assert "it serves alpha. A model in a local folder goes by the folder's name" in refusal()
        swarm.start("0:6").wait_ready().stop()
        wait_until(lambda: "it serves alpha. A model" in refusal())
        command = [sys.executable, "-m", "swarm.cli", "status", "gamma", "--initial-peers", swarm.address]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
        assert "gamma: no server of this swarm serves it; it serves alpha" in shown
