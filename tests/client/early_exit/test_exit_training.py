"""What lenses and classifiers learn."""

from __future__ import annotations

import torch
from torch import nn

from swarm.client.early_exit.exit_training import LensFit, fit_classifier

WIDTH = 12


def test_a_lens_finds_the_map_between_what_it_saw():
    random = torch.Generator().manual_seed(0)
    turned = torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=random)
    head = torch.randn(WIDTH, 3 * WIDTH, generator=random, requires_grad=True)

    def read(hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head

    fit, batches = LensFit(WIDTH, read), 60
    for number in range(batches):
        hidden = torch.randn(2048, WIDTH, generator=random)
        fit.learn(hidden, hidden @ turned, len(hidden), number / batches)
    other = torch.randn(500, WIDTH, generator=random)
    right = read(other @ turned).argmax(-1)
    assert (read(other).argmax(-1) == right).float().mean() < 0.6
    assert (read(fit.lens()(other)).argmax(-1) == right).float().mean() > 0.9
    assert fit.lens()(other.bfloat16()).dtype == torch.bfloat16
    assert head.grad is None


def test_a_lens_learns_from_what_the_head_of_a_model_in_half_precision_reads():
    random = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.bfloat16)
    hidden = torch.randn(600, WIDTH, generator=random).bfloat16()
    fit = LensFit(WIDTH, lambda one: head(one).float())
    fit.learn(hidden, 2 * hidden, 600, 0.0)
    lens = fit.lens()
    assert lens.weight_HH.dtype == torch.float32
    assert not lens.weight_HH.equal(torch.eye(WIDTH))


def test_a_lens_that_has_learned_nothing_changes_nothing():
    hidden = torch.randn(4, WIDTH)
    assert LensFit(WIDTH, lambda one: one).lens()(hidden).equal(hidden)


def test_a_classifier_tells_apart_what_a_direction_tells_apart():
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(2000, WIDTH, generator=random) * 3 + 5
    direction = torch.randn(WIDTH, generator=random)
    is_right = (hidden - 5) @ direction > 1.0
    classifier = fit_classifier(hidden, is_right)
    found = classifier(hidden) > 0.5
    assert (found == is_right).float().mean() > 0.97
    assert classifier(hidden.half()[0]).dtype == torch.float32


def test_a_classifier_of_tokens_that_are_all_right():
    hidden = torch.randn(100, WIDTH)
    assert (fit_classifier(hidden, torch.ones(100, dtype=torch.bool))(hidden) > 0.9).all()
