"""Sampled texts with tokens that leave early are those of the full model with the same random numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from swarm import EarlyExit
from swarm.client.routes.events import ExitVerified
from tests.client.prompts import PAD, prompt

pytestmark = pytest.mark.usefixtures("always_look")

TOKENS = (5, 6, 7)
"""The only tokens of the texts. The full model and the first blocks find each of them likely enough, so that many early
tokens stand and many do not."""

SAMPLING = {
    "do_sample": True,
    "top_k": 0,
    "temperature": 2.0,
    "max_new_tokens": 12,
    "pad_token_id": PAD,
    "prefix_allowed_tokens_fn": lambda row, tokens: list(TOKENS),
}
ROWS = 3


@pytest.mark.parametrize("batch", ["all", "row"])
def test_sampled_texts_are_those_of_the_full_model(model: Any, batch: str) -> None:
    """Some tokens stand, and others are replaced and what was behind them given up."""
    exits, verified, seed = EarlyExit(threshold=0.0, batch=batch), Counter[bool](), 0
    own = {} if batch == "all" else {"lanes": ROWS}  # sequences that leave by themselves are lanes
    model.swarm.add_listener(lambda event: verified.update([event.stands] if isinstance(event, ExitVerified) else []))
    while min(verified[True], verified[False]) < 10:
        texts = []
        for how in ({"early_exit": exits}, own):
            torch.manual_seed(seed)
            texts.append(model.generate(prompt().repeat(ROWS, 1), **how, **SAMPLING))
        assert texts[0].equal(texts[1])
        seed += 1
