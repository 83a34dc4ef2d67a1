"""Reading only what depends on hidden states: the same logits as the whole forward's, or the whole forward."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.exits.direct_reading import DirectReading, trace_reading
from swarm.models.exits.model_head import ModelHead
from swarm.models.weights.frozen_linear import can_prepack
from tests import zoo

WIDTH = 6


@pytest.mark.parametrize("family", zoo.REPRESENTATIVES)
def test_a_family_is_read_directly_and_bit_for_bit(family, tmp_path):
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        head = ModelHead(checkpoint, dtype, torch.device("cpu"))
        if dtype is torch.bfloat16 and not can_prepack(dtype):
            continue
        for rows in (1, 3):
            example, *others = torch.randn(4, rows, checkpoint.config.hidden_size).to(dtype)
            with torch.inference_mode():
                reading = trace_reading(head._read_whole, example)
                assert reading != head._read_whole
                for hidden_RH in others:
                    expected = head._read_whole(hidden_RH)
                    assert reading(hidden_RH).equal(expected)
                    assert head(hidden_RH).equal(expected)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)).requires_grad_(False)


class Counted:
    """A forward that computes much that does not depend on the hidden states, and counts its calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mask = torch.ones(4).cumsum(0)
        logits = self.model(hidden) * mask.sum()
        return (logits / 30).tanh_().mul(30)


def test_the_forward_runs_twice_and_then_once_for_each_shape(model):
    whole = Counted(model)
    reading = DirectReading(whole)
    states = torch.randn(5, 1, WIDTH)
    found = [reading(one) for one in states]
    assert whole.calls == 3
    assert all(one.equal(whole(hidden)) for one, hidden in zip(found, states, strict=True))
    whole.calls = 0
    assert [reading(torch.randn(2, WIDTH)).shape for _ in range(3)] == [(2, 9)] * 3
    assert whole.calls == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, hidden: model(hidden) + hidden.sum().item(),
        lambda model, hidden: nn.functional.dropout(model(hidden)),
        lambda model, hidden: model(hidden) + hidden.new_ones(len(hidden) ** 2).mean(),
        lambda model, hidden: model(hidden) / 0 * 0,  # not a number
    ],
    ids=["as a number", "random", "a square", "nan"],
)
def test_what_cannot_be_recorded_is_read_with_the_whole_forward(model, forward):
    calls: list[torch.Tensor] = []

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(forward(model, hidden))
        return calls[-1]

    reading = DirectReading(whole)
    for hidden in torch.randn(3, 2, WIDTH):
        found = reading(hidden)
        assert found is calls[-1], "no recording"


def test_it_takes_no_random_numbers(model):
    before = torch.get_rng_state()
    DirectReading(model)(torch.zeros(2, WIDTH))
    assert torch.get_rng_state().equal(before)


def test_it_is_recorded_and_compared_alone(model):
    inside: list[bool] = [False]
    seen: list[bool] = []

    @contextmanager
    def alone():
        inside[0] = True
        yield
        inside[0] = False

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(inside[0])
        return model(hidden)

    reading = DirectReading(whole, alone)
    for _ in range(3):
        reading(torch.randn(1, WIDTH))
    assert seen == [True, True, True]
