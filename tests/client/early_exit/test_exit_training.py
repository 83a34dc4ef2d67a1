"""What lenses and classifiers learn from sums."""

from __future__ import annotations

import torch

from swarm.client.early_exit.exit_training import LensFit, fit_classifier

WIDTH = 12


def test_a_lens_finds_the_map_between_what_it_saw():
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(WIDTH, WIDTH, generator=random), torch.randn(WIDTH, generator=random)
    fit = LensFit(WIDTH)
    for _ in range(20):
        hidden = torch.randn(64, WIDTH, generator=random)
        fit.add(hidden, hidden @ weight + bias)
    lens, hidden = fit.lens(), torch.randn(5, WIDTH, generator=random)
    torch.testing.assert_close(lens(hidden), hidden @ weight + bias, rtol=0.02, atol=0.05)
    assert lens(hidden.bfloat16()).dtype == torch.bfloat16


def test_a_lens_that_saw_little_leaves_things_about_as_they_are():
    fit, hidden = LensFit(WIDTH), torch.randn(1, WIDTH)
    fit.add(hidden, hidden)
    other = torch.randn(4, WIDTH)
    torch.testing.assert_close(fit.lens()(other), other, rtol=0.01, atol=0.01)
    torch.testing.assert_close(LensFit(WIDTH).lens()(other), other)


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
