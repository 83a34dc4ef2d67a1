"""Every family through a real chain of three servers: tokens and logits equal the local transformers model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm import EarlyExit
from tests.slow import slow_except
from tests.swarms import run_client, run_swarm
from tests.zoo import FAMILIES, PROMPTS, REPRESENTATIVES, make_checkpoint

SPANS = ("0:2", "2:3", "3:6")  # the second and third start in the middle of every pattern
NEW_TOKENS = 12
PAD = 0


def batch() -> dict[str, torch.Tensor]:
    """Two prompts of different lengths, padded on the left."""
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


@pytest.mark.parametrize("family", slow_except(FAMILIES, *REPRESENTATIVES))
def test_family(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = batch()
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD}
    expected = local.generate(**inputs, **settings)
    for row in expected[:, -NEW_TOKENS:]:
        assert row.unique().numel() >= 4, "text that does not vary proves nothing"
    with torch.no_grad():
        expected_logits = local(**inputs).logits

    with run_swarm(folder, SPANS, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        assert type(model).__name__ == type(local).__name__
        written = model.generate(**inputs, **settings)
        guessed = model.generate(**inputs, **settings, early_exit=EarlyExit(threshold=0.0, batch="all"))
        with torch.no_grad():
            logits = model(**inputs).logits

    assert written.tolist() == expected.tolist()
    assert guessed.tolist() == expected.tolist()
    real = inputs["attention_mask"].bool()
    error = (logits - expected_logits)[real].abs().max() / expected_logits[real].abs().max()
    assert error <= 1e-4
