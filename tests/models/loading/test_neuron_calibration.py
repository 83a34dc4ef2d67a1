from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.errors import CheckpointError
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.loading import neuron_calibration
from swarm.models.loading.neuron_calibration import calibrate, calibration_tokens
from tests import zoo


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make_checkpoint("opt", tmp_path_factory.mktemp("zoo") / "opt")


TOKENS = torch.randint(1, zoo.VOCABULARY, (20, 24), generator=torch.Generator().manual_seed(0))


def perplexity_with(model: torch.nn.Module, masks: dict[int, torch.nn.Module]) -> float:
    for block, predictor in masks.items():
        layer = model.model.decoder.layers[block]
        kept: list[torch.Tensor] = []
        layer.fc1.register_forward_pre_hook(
            lambda _, args, k=kept, p=predictor: k.__setitem__(slice(None), [p.select(args[0])])
        )
        layer.fc2.register_forward_pre_hook(lambda _, args, k=kept: (args[0] * k[0],))
    unseen = TOKENS[15:]
    with torch.no_grad():
        return math.exp(model(input_ids=unseen, labels=unseen).loss)


def test_predictors_are_made_for_the_blocks_and_the_loss_is_that_of_the_whole_model(opt: Path) -> None:
    checkpoint = open_checkpoint(str(opt))
    made = calibrate(checkpoint, range(2, 5), TOKENS, torch.float32, recall=0.9)
    assert set(made) == {2, 3, 4}
    digests = checkpoint.block_digests(2, 5)
    assert digests is not None
    assert [digest for _, digest in made.values()] == list(digests)
    exact = perplexity_with(AutoModelForCausalLM.from_pretrained(opt), {})
    predictors = {block: found.predictor for block, (found, _) in made.items()}
    sparse = perplexity_with(AutoModelForCausalLM.from_pretrained(opt), predictors)
    assert sparse != pytest.approx(exact, rel=1e-6)
    for found, _ in made.values():
        assert found.perplexity_loss == pytest.approx((sparse / exact - 1) / 3, rel=1e-3)
        assert 0 < found.two_tokens < 1


def test_blocks_behind_the_last_are_not_read_from_the_hub(opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = replace(open_checkpoint(str(opt)), source="org/model")
    loaded: list[int] = []
    load = neuron_calibration.load_block

    def recorded(one: Checkpoint, block: int, dtype: torch.dtype) -> tuple[Any, str]:
        loaded.append(block)
        return load(one, block, dtype)

    monkeypatch.setattr(neuron_calibration, "load_block", recorded)
    made = calibrate(checkpoint, [1, 2], TOKENS, torch.float32, recall=0.9)
    assert loaded == [0, 1, 2]
    assert [found.perplexity_loss for found, _ in made.values()] == [None, None]


def test_tokens_come_from_all_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_calibration, "SEQUENCES", 3)
    monkeypatch.setattr(neuron_calibration, "TOKENS", 4)

    class Characters:
        def __init__(self, text: str, **options: object) -> None:
            self.input_ids = list(map(ord, text))

    tokens = calibration_tokens(Characters, "abcdefghijklmnopqrstuvwx")
    assert ["".join(map(chr, row)) for row in tokens.tolist()] == ["abcd", "klmn", "uvwx"]
    with pytest.raises(CheckpointError, match="use a longer one"):
        calibration_tokens(Characters, "abc")
