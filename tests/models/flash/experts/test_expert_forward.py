"""Experts that are read on demand compute what resident ones do, bit by bit."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import InvalidOption
from tests import zoo
from tests.models.flash.experts.flash_zoo import EXPERT_FAMILIES, flash_model, layers_of, resident_model

torch.set_num_threads(1)

PROMPT = torch.tensor([zoo.PROMPTS[1] * 3, list(reversed(zoo.PROMPTS[1])) * 3])
SHARES = (0.0, 0.25, 1.0)
"""Of the experts in memory; 0 is room for two."""

WHOLE_VECTORS = {"gpt_oss": {"intermediate_size": 64}}
"""Families that activate all experts' values as one flat tensor. At its end, where no whole vector of the processor is
left, torch computes a sigmoid with another last bit."""


def logits_after(model, tokens_RT: torch.Tensor, steps: int = 4) -> list[torch.Tensor]:
    """Logits of a prompt, and of single tokens after it."""
    with torch.inference_mode():
        result = model(tokens_RT, use_cache=True)
        outputs = [result.logits]
        for step in range(steps):
            token = tokens_RT[:, step : step + 1]
            result = model(token, past_key_values=result.past_key_values, use_cache=True)
            outputs.append(result.logits)
    return outputs


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_prompt_and_single_tokens_have_the_bits_of_the_resident_model(family):
    for dtype in (torch.float32, torch.bfloat16):
        resident = resident_model(family, dtype, **WHOLE_VECTORS.get(family, {}))
        expected = logits_after(resident, PROMPT)
        for share in SHARES:
            flash = flash_model(resident, share)
            names = {name for name, _ in layers_of(flash.model).named_parameters()}
            assert not {name for name in names if ".experts." in name}, "weights of experts are left in the model"
            for got, wanted in zip(logits_after(flash.model, PROMPT), expected, strict=True):
                assert torch.equal(got, wanted), (dtype, share, (got - wanted).abs().max())


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_greedy_text_is_that_of_the_resident_model(family):
    resident = resident_model(family)
    flash = flash_model(resident, 0.5)
    assert zoo.greedy_texts(flash.model) == zoo.greedy_texts(resident)
    (pool,) = flash.pools
    assert 0 < pool.counters.misses < pool.counters.hits + pool.counters.misses
    assert pool.bytes_read == pool.counters.misses * pool.buffer.layout.stride


def test_gradients_are_refused():
    flash = flash_model(resident_model("mixtral"), 0.25)
    with pytest.raises(InvalidOption, match="no gradients"):
        flash.model(PROMPT)
