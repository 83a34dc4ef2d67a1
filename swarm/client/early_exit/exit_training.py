"""Training lenses and classifiers from hidden states that come by: a few minutes for a small model.

A lens is learned by distillation: what the model's norm and head read through it is to be as near as possible to what
they read behind the last block ("Eliciting Latent Predictions from Transformers with the Tuned Lens", Belrose et al.,
2023, section 2). It begins as no lens at all. A classifier is a logistic regression over the newest tokens: is the
token that the lens leads to the full model's?
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from swarm.models.exits.trained_exits import ExitClassifier, ExitLens

LEARNING_RATE = 0.014
"""Of a lens, divided by the square root of the model's width: Adam moves all inputs of a value at once."""

STEP_TOKENS = 512
"""Tokens of one step of learning, drawn from the newest ones. They need logits, so few at once."""

PASSES = 2
"""How often a lens learns from a token, on average."""

KEPT_TOKENS = 8192
"""The newest tokens: those from which lenses and classifiers learn, and those over which agreement is measured."""

CLASSIFIER_STEPS = 100
CLASSIFIER_PENALTY = 1e-3


class LensFit:
    """A lens while it learns.

    Args:
        width: values of a hidden state.
        read: hidden states `[N, H]` behind the last block, of the model's dtype, to logits `[N, V]` float32; lets
            gradients through.
    """

    def __init__(self, width: int, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._read = read
        self._weight_HH = torch.eye(width).requires_grad_()
        self._bias_H = torch.zeros(width).requires_grad_()
        self._optimizer = torch.optim.Adam([self._weight_HH, self._bias_H])
        self._rate = LEARNING_RATE / width**0.5
        self._draw = torch.Generator().manual_seed(0)

    def learn(self, hidden_NH: torch.Tensor, final_NH: torch.Tensor, arrived: int, share_done: float) -> None:
        """Learn from the newest tokens: hidden states in front of the block, and behind the last one.

        Args:
            arrived: how many of them are new.
            share_done: of all tokens that will come; the steps become smaller with it.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * (1 - share_done)
        for _ in range(max(1, PASSES * arrived // STEP_TOKENS)):
            chosen_N = torch.randint(len(hidden_NH), (STEP_TOKENS,), generator=self._draw)
            with torch.no_grad():
                target_NV = self._read(final_NH[chosen_N]).softmax(-1)
            with torch.enable_grad():
                early_NH = hidden_NH[chosen_N].float() @ self._weight_HH + self._bias_H
                early_NV = self._read(early_NH.to(hidden_NH.dtype))
                loss = nn.functional.cross_entropy(early_NV, target_NV)
                # Not backward(): the head's own weights are to get no gradients.
                self._weight_HH.grad, self._bias_H.grad = torch.autograd.grad(loss, [self._weight_HH, self._bias_H])
            self._optimizer.step()

    def lens(self) -> ExitLens:
        """What was learned so far."""
        return ExitLens(self._weight_HH.detach().clone(), self._bias_H.detach().clone())


def fit_classifier(hidden_NH: torch.Tensor, is_right_N: torch.Tensor) -> ExitClassifier:
    """The classifier for tokens of which it is known whether leaving would have been right."""
    hidden_NH, labels_N = hidden_NH.float(), is_right_N.float()
    mean_H, deviation_H = hidden_NH.mean(0), hidden_NH.std(0).clamp(min=1e-6)
    inputs_NH = (hidden_NH - mean_H) / deviation_H
    weight_H = torch.zeros(inputs_NH.shape[1], requires_grad=True)
    share = labels_N.mean().clamp(1e-3, 1 - 1e-3)
    bias = torch.logit(share).detach().reshape(1).requires_grad_()
    optimizer = torch.optim.LBFGS([weight_H, bias], max_iter=CLASSIFIER_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = nn.functional.binary_cross_entropy_with_logits(inputs_NH @ weight_H + bias, labels_N)
        value = value + CLASSIFIER_PENALTY * weight_H.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    scaled_H = (weight_H / deviation_H).detach()
    return ExitClassifier(scaled_H, (bias - mean_H @ scaled_H).detach())
