"""What rounding on the way does to what the demo model says, over three servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.wire_damage import Damage, InProcess, Variant, measure
from swarm.data_structures import WireFormat
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.models.wire_defaults import BLOCKWISE8_FAMILIES, MAX_PERPLEXITY_CHANGE_PERCENT
from tests.swarms import run_client, run_swarm

SPANS = ("0:4", "4:8", "8:12")
HOPS = len(SPANS)
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


@pytest.mark.slow
def test_the_demo_model_keeps_the_rule_of_its_family(windows) -> None:
    """In one process, as the calibration measures: 8 bits, three hops, and channels that stand out."""
    exact = log_probabilities(load_local_model(DEMO_FOLDER), windows[:, :-1])
    model = InProcess(DEMO_FOLDER)
    assert (model.log_probabilities(windows[:, :-1], Variant(WireFormat.NONE, HOPS)) - exact).abs().max() < 1e-3
    plain, many = Variant(WireFormat.BLOCKWISE8, HOPS), Variant(WireFormat.BLOCKWISE8, 12)
    spoilt = Variant(WireFormat.BLOCKWISE8, HOPS, 1e5)
    _, found = measure(model, windows, [Variant(WireFormat.NONE, HOPS), plain, many, spoilt])
    assert found[Variant(WireFormat.NONE, HOPS)].divergence == pytest.approx(0, abs=1e-7)
    assert model.family in BLOCKWISE8_FAMILIES
    assert abs(found[plain].perplexity) < MAX_PERPLEXITY_CHANGE_PERCENT
    # The measure sees more rounding, and what would be too much.
    assert found[plain].divergence < found[many].divergence < found[spoilt].divergence
    assert found[plain].greedy_changed < found[spoilt].greedy_changed
