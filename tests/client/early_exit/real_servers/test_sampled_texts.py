"""Sampled texts with tokens that leave early have the full model's distribution."""

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

TEMPERATURE = 2.0
SAMPLING = {
    "do_sample": True,
    "top_k": 0,
    "temperature": TEMPERATURE,
    "max_new_tokens": 3,
    "pad_token_id": PAD,
    "prefix_allowed_tokens_fn": lambda row, tokens: list(TOKENS),
}


@pytest.fixture(scope="module")
def expected(local: Any) -> dict[tuple[int, ...], float]:
    """The probability of each text of three tokens behind the prompt."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in found.items():
            with torch.no_grad():
                logits = local(torch.cat([prompt()[0], torch.tensor(text, dtype=torch.long)]).unsqueeze(0)).logits
            shares = (logits[0, -1, list(TOKENS)] / TEMPERATURE).softmax(-1)
            longer |= {(*text, token): probability * float(share) for token, share in zip(TOKENS, shares, strict=True)}
        found = longer
    return found


def chi_squared(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """How far counts of 27 texts are from what is expected.

    With 26 degrees of freedom, 80 is exceeded by chance once in five million.
    """
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    return sum((counts[text] - total * share) ** 2 / (total * share) for text, share in expected.items())


def test_texts_of_a_batch_that_leaves_together(model, expected):
    """The tokens of some sequences stand, and the others' are replaced."""
    rows, texts, exits = 400, 2000, EarlyExit(threshold=0.0, batch="all")
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    events: list[Any] = []
    while sum(counts.values()) < texts or ExitVerified not in map(type, events):
        with model.inference_session(max_length=16, listener=events.append):
            found = model.generate(prompt(), num_return_sequences=rows, early_exit=exits, **SAMPLING)
        counts.update(map(tuple, found[:, 7:].tolist()))
    assert chi_squared(counts, expected) < 80


@pytest.mark.slow
def test_texts_that_leave_by_themselves(model, expected):
    """Two early tokens in a row stand, or one of them is replaced and what was behind it given up."""
    rows, texts, enough, exits = 20, 1000, 100, EarlyExit(threshold=0.0, batch="row")
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    events: list[Any] = []
    model.swarm.add_listener(events.append)
    verified: Counter[bool] = Counter()
    while sum(counts.values()) < texts or min(verified[True], verified[False]) < enough:
        found = model.generate(prompt().repeat(rows, 1), early_exit=exits, **SAMPLING)
        counts.update(map(tuple, found[:, 7:].tolist()))
        verified = Counter(event.stands for event in events if isinstance(event, ExitVerified))
    assert chi_squared(counts, expected) < 80
