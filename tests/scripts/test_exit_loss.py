"""The loss over exits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.exit_loss import (
    EXITS_PER_STEP,
    dropout_rate,
    exit_agreement,
    exit_loss,
    exit_weights,
    exits_of_step,
)

SHAPES = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_attention_heads": 2},
}
TOKENS_RT = torch.arange(20).view(2, 10)


def small(family):
    torch.manual_seed(0)
    shape = {**SHAPES[family], "num_hidden_layers": 4, "vocab_size": 40, "max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()


@given(st.integers(1, 60), st.integers(0, 1000))
def test_all_exits_have_their_turn_and_few_are_trained_at_once(blocks, step):
    exits = exits_of_step(step, blocks)
    assert len(exits) <= EXITS_PER_STEP
    turns = [set(exits_of_step(step + later, blocks)) for later in range(blocks)]
    assert set().union(*turns) == set(range(1, blocks))


@given(st.integers(2, 60), st.floats(0, 1))
def test_deep_blocks_are_left_out_more_often_and_the_first_never(blocks, most):
    rates = [dropout_rate(block, blocks, most) for block in range(blocks)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(most)


@pytest.mark.parametrize("family", SHAPES)
def test_without_exits_the_loss_is_the_models_own(family):
    model = small(family)
    loss = exit_loss(model, TOKENS_RT, TOKENS_RT, exit_weights(0, 4, 0.0))
    logits = model(input_ids=TOKENS_RT).logits
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS_RT.flatten()))


@pytest.mark.parametrize("family", SHAPES)
def test_a_model_learns_to_say_the_same_at_an_exit_as_at_its_end(family):
    model = small(family)
    weights = {2: 0.5, 4: 0.5}
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    before = exit_agreement(model, TOKENS_RT)[2]
    for _ in range(60):
        loss = exit_loss(model, TOKENS_RT[:, :-1], TOKENS_RT[:, 1:], weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = exit_agreement(model, TOKENS_RT)[2]
    assert before < 0.9 < after


def test_an_exit_teaches_nothing_to_the_full_model():
    """Its target is the full model's answer, which it must not bend."""
    model = small("llama")
    exit_loss(model, TOKENS_RT, TOKENS_RT, {2: 1.0, 4: 0.0}).backward()
    assert all(float(p.grad.abs().max()) == 0 for p in model.model.layers[3].parameters())
    assert any(float(p.grad.abs().max()) > 0 for p in model.model.layers[1].parameters())
