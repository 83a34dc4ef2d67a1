"""What rounding on the way does to what the demo model says, over three servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.wire_damage import Damage
from swarm.data_structures import WireFormat
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.swarms import run_client, run_swarm

SPANS = ("0:4", "4:8", "8:12")
WINDOW = 256
ENGLISH = Path(__file__).parents[1] / "LICENSE"
"""Some thousand tokens that the model was not trained on, and that everybody has."""


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    ids = torch.tensor(load_tokenizer(DEMO_FOLDER)(ENGLISH.read_text("utf-8"), verbose=False).input_ids)
    count = len(ids) // (WINDOW + 1)
    assert count >= 8
    return ids[: count * (WINDOW + 1)].view(count, WINDOW + 1)


@torch.no_grad()
def log_probabilities(model: object, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.float().log_softmax(-1)  # type: ignore[operator]


@pytest.mark.slow
def test_the_default_changes_the_perplexity_over_real_servers_by_less_than_half_a_percent(windows) -> None:
    ids, targets = windows[:, :-1], windows[:, 1:]
    exact = log_probabilities(load_local_model(DEMO_FOLDER), ids)
    with run_swarm(DEMO_FOLDER, SPANS) as swarm:
        with run_client(swarm, wire="auto") as model:
            assert model.swarm.config.wire is WireFormat.BLOCKWISE8
            came = log_probabilities(model, ids)
        with run_client(swarm, wire="none") as model:
            assert (log_probabilities(model, ids) - exact).abs().max() < 1e-3
    damage = Damage()
    damage.add(exact, came, targets)
    assert abs(damage.perplexity) < 0.5
    assert damage.divergence > 1e-6, "nothing was rounded"
