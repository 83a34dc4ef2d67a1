"""Training lenses and classifiers from hidden states that come by: no gradients, a few minutes for a small model.

A lens is the least-squares solution between what lies in front of a block and what lies behind the last one, with a
little regularization. The sums that it needs are added up text by text, so memory does not grow with the texts.
A classifier is a logistic regression over the tokens of the last texts: is the token that the lens leads to the full
model's?
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from swarm.models.exits.trained_exits import ExitClassifier, ExitLens

RIDGE = 1e-3
"""Regularization of a lens, as a share of the mean square of its inputs."""

KEPT_TOKENS = 8192
"""Tokens over which a classifier is fitted, and over which agreement is measured; the newest."""

CLASSIFIER_STEPS = 100
CLASSIFIER_PENALTY = 1e-3


@dataclass
class LensFit:
    """The sums from which one lens follows.

    Args:
        width: values of a hidden state.
    """

    width: int
    _inputs: torch.Tensor = field(init=False)
    _products: torch.Tensor = field(init=False)
    _squares: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._squares = torch.zeros(self.width + 1, self.width + 1, dtype=torch.float64)
        self._products = torch.zeros(self.width + 1, self.width, dtype=torch.float64)

    def add(self, hidden_NH: torch.Tensor, final_NH: torch.Tensor) -> None:
        """Learn from tokens: hidden states in front of the block, and behind the last one."""
        inputs = torch.cat([hidden_NH.double(), hidden_NH.new_ones(len(hidden_NH), 1, dtype=torch.float64)], dim=1)
        self._squares += inputs.T @ inputs
        self._products += inputs.T @ final_NH.double()

    def lens(self) -> ExitLens:
        """The lens that is best for what was seen."""
        scale = float(self._squares.diagonal()[:-1].mean()) or 1.0
        penalty = torch.full((self.width + 1,), RIDGE * scale, dtype=torch.float64)
        penalty[-1] = 1e-9 * scale  # the bias is free
        # Towards leaving hidden states as they are, which is what is right without anything learned.
        target = self._products.clone()
        target[:-1].diagonal().add_(RIDGE * scale)
        solution = torch.linalg.solve(self._squares + torch.diag(penalty), target).float()
        return ExitLens(solution[:-1].contiguous(), solution[-1].contiguous())


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
