"""Making predictors: from the weights alone, or trained on what a layer received for some text; and their thresholds.

"LLM in a flash", section 3.1 and appendix B, trains a predictor of each layer with a loss that is balanced over active
and inactive neurons. Here an active neuron weighs by the square of what it adds to the layer's result, since most
misses cost nothing, above all with a squared ReLU, which spreads contributions over orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from swarm.models.flash.block_plan import BlockPlan
from swarm.models.flash.neurons.feed_forward_site import ACTIVATION, DOWN, entry_role
from swarm.models.flash.neurons.neuron_products import neuron_values
from swarm.models.flash.neurons.predictor import CalibratedPredictor, LowRankPredictor

RECALL = 0.998
"""Share of the squared contributions that predictors have to select. The loss of perplexity is in proportion to the
rest: a small model with squared ReLU loses 5 % at 0.95 and 1 % at 0.99, one with ReLU a tenth to a half of that
(`benchmarks.flash.quality`)."""

RANK_DIVISORS = (32, 16, 8, 4)
"""Ranks to choose from, as parts of the hidden size: for 4096, from the paper's 128 to its 1024."""

READ_WEIGHT = 3
"""What a selected neuron costs beside a part of the predictor of the same size: some selected neurons have to be read,
which takes several times as long as computing."""

CALIBRATION_SHARE = 0.25
"""Of the sequences: thresholds are found with text that the predictor was not trained on."""

EXTRA_RANK, POWER_ITERATIONS = 16, 4
"""Of the randomized SVD."""


@dataclass(frozen=True)
class TrainingOptions:
    """How predictors are trained.

    Attributes:
        epochs: over the inputs.
        batch: tokens of a step.
        learning_rate: at the beginning; it falls to zero along a cosine.
    """

    epochs: int = 8
    batch: int = 128
    learning_rate: float = 2e-3
    seed: int = 0


class DenseFeedForward:
    """A block's feed-forward layer with all weights in memory, as predictors learn from it.

    Args:
        block: loaded, with the modules of `plan` in their places.

    Attributes:
        weight, bias: of the entry, whose product the activation receives: `[neurons, hidden]`, `[neurons]`.
        record_values: values of a neuron's weights.
    """

    def __init__(self, block: nn.Module, plan: BlockPlan) -> None:
        modules = {role: block.get_submodule(path) for role, path in plan.modules.items()}
        self._activation = modules.pop(ACTIVATION)
        self._weights = {role: module.get_parameter("weight").detach() for role, module in modules.items()}
        biases = {role: dict(module.named_parameters()).get("bias") for role, module in modules.items()}
        self._biases = {role: None if bias is None else bias.detach() for role, bias in biases.items()}
        self.weight = self._weights[entry_role(plan)]
        bias = self._biases[entry_role(plan)]
        self.bias = self.weight.new_zeros(len(self.weight)) if bias is None else bias
        self.record_values = sum(weight.numel() for weight in self._weights.values()) // len(self.weight)
        self._down_norms_N = self._weights[DOWN].float().norm(dim=0)

    @torch.no_grad()
    def contributions(self, inputs_TH: torch.Tensor) -> torch.Tensor:
        """The length of what each neuron adds to the layer's result, `[tokens, neurons]` fp32; zero if inactive."""
        values_TN = neuron_values(inputs_TH, self._weights, self._biases, self._activation)
        lengths_TN: torch.Tensor = values_TN.float().abs() * self._down_norms_N
        return lengths_TN


def svd_predictor(layer: DenseFeedForward, rank: int, inputs_TH: torch.Tensor | None = None) -> LowRankPredictor:
    """The best approximation of the entry's weights by a product of this rank: untrained.

    Args:
        inputs_TH: if given, what is approximated is the product with inputs like these, not the weights as such.
    """
    weight = layer.weight.float()
    scale, unscale = _whitening(inputs_TH, weight.shape[1])
    if rank + EXTRA_RANK < min(weight.shape):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(weight @ scale, rank + EXTRA_RANK, POWER_ITERATIONS)
    else:
        left, sizes, right_t = torch.linalg.svd(weight @ scale, full_matrices=False)
        right = right_t.T
    second = left[:, :rank] * sizes[:rank]
    return LowRankPredictor(right[:, :rank].T @ unscale, second, layer.bias.float(), 0.0)


def trained_predictor(
    start: LowRankPredictor, layer: DenseFeedForward, inputs_TH: torch.Tensor, options: TrainingOptions
) -> LowRankPredictor:
    """Train `start` to tell which neurons are active.

    Args:
        inputs_TH: what the layer received for some text.
    """
    inputs_TH = inputs_TH.detach()
    # Scores become logits, whose size decides how far apart the classes begin.
    size = start.scores(inputs_TH[: options.batch].float()).std().clamp(min=1e-6)
    parameters = [nn.Parameter(start.first.clone()), nn.Parameter(start.second / size), nn.Parameter(start.bias / size)]
    first, second, bias = parameters
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    contributions_TN = torch.cat([layer.contributions(batch_TH) for batch_TH in inputs_TH.split(options.batch)])
    steps = max(1, options.epochs * len(inputs_TH) // options.batch)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(len(inputs_TH), (options.batch,), generator=generator)
        with torch.enable_grad():
            scores_TN = functional.linear(functional.linear(inputs_TH[chosen].float(), first), second, bias)
            torch.autograd.backward(balanced_loss(scores_TN, contributions_TN[chosen]))
        optimizer.step()
        optimizer.zero_grad()
    return LowRankPredictor(first.detach(), second.detach(), bias.detach(), 0.0)


def balanced_loss(scores_TN: torch.Tensor, contributions_TN: torch.Tensor) -> torch.Tensor:
    """Cross entropy of scores, as logits of being active, with equal weight for active and inactive neurons in all.

    Among the active ones, a neuron weighs by its squared contribution: what missing it costs.
    """
    active = contributions_TN > 0
    weights = energy(contributions_TN)
    positive = (weights * functional.softplus(-scores_TN)).sum() / weights.sum().clamp(min=1e-30)
    negative = (functional.softplus(scores_TN) * ~active).sum() / (~active).sum().clamp(min=1)
    return positive + negative


def energy(contributions_TN: torch.Tensor) -> torch.Tensor:
    """A miss costs the square of the contribution: misses add up like independent errors."""
    return contributions_TN.square()


def threshold_for(scores_TN: torch.Tensor, contributions_TN: torch.Tensor, recall: float) -> float:
    """The highest threshold above which this share of the squared contributions of all neurons is selected.

    Args:
        scores_TN: of a predictor, for tokens that it was not trained on.
    """
    order = scores_TN.flatten().argsort(descending=True)
    found = energy(contributions_TN).flatten()[order].double().cumsum(0)
    last = int(torch.searchsorted(found, recall * found[-1]).clamp(max=len(order) - 1))
    return float(torch.nextafter(scores_TN.flatten()[order[last]].float(), torch.tensor(-torch.inf)))


def _whitening(inputs_TH: torch.Tensor | None, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The root of the inputs' second moments, and its inverse: `[hidden, hidden]` each."""
    if inputs_TH is None:
        return torch.eye(hidden), torch.eye(hidden)
    inputs = inputs_TH.float()
    values, vectors = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    roots = values.clamp(min=1e-4 * float(values[-1])).sqrt()
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T


def make_predictor(
    layer: DenseFeedForward, inputs_RTH: torch.Tensor, recall: float = RECALL, options: TrainingOptions | None = None
) -> CalibratedPredictor:
    """Choose a rank, train a predictor, and find the threshold that reaches `recall` on text that it has not seen.

    Args:
        inputs_RTH: what the layer received for sequences of text; at least two of them.
    """
    split = training_sequences(len(inputs_RTH))
    training_TH, unseen_TH = inputs_RTH[:split].flatten(0, 1), inputs_RTH[split:].flatten(0, 1)
    contributions_TN = layer.contributions(unseen_TH)

    def calibrated(predictor: LowRankPredictor) -> tuple[float, LowRankPredictor]:
        """The share that it selects, and the predictor with its threshold."""
        scores_TN = predictor.scores(unseen_TH.float())
        threshold = threshold_for(scores_TN, contributions_TN, recall)
        found = LowRankPredictor(predictor.first, predictor.second, predictor.bias, threshold)
        return (scores_TN > threshold).float().mean().item(), found

    neurons, hidden = layer.weight.shape
    ranks = sorted({max(1, hidden // divisor) for divisor in RANK_DIVISORS})
    largest = svd_predictor(layer, ranks[-1], training_TH)
    untrained = {rank: calibrated(largest.truncated(rank)) for rank in ranks}
    rank = cheapest_rank({rank: share for rank, (share, _) in untrained.items()}, neurons, hidden, layer.record_values)
    start = untrained[rank]
    trained = calibrated(trained_predictor(start[1], layer, training_TH, options or TrainingOptions()))
    _, best = min(start, trained, key=lambda pair: pair[0])
    selected_RTN = best.select(inputs_RTH[split:].float())
    return CalibratedPredictor(best.to(layer.weight.dtype), needed_by_two_tokens(selected_RTN), recall)


def training_sequences(sequences: int) -> int:
    """How many of the first sequences of a text predictors are trained with. The others are for calibration."""
    return max(1, round(sequences * (1 - CALIBRATION_SHARE)))


def cheapest_rank(shares: Mapping[int, float], neurons: int, hidden: int, record_values: int) -> int:
    """The rank with which predictor and selected neurons together cost least.

    A larger predictor selects fewer neurons in vain. That pays where many are active: in the paper in the last layers
    of OPT, Falcon and Persimmon, and in the middle ones of Phi-2 and Llama 2.

    Args:
        shares: rank to the share of neurons that is selected.
        record_values: values of a neuron's weights.
    """

    def cost(rank: int) -> float:
        return rank * (hidden + neurons) + READ_WEIGHT * shares[rank] * neurons * record_values

    return min(shares, key=cost)


def needed_by_two_tokens(selected_RTN: torch.Tensor) -> float:
    """Share of the neurons that one or the other of two consecutive tokens needs; never zero.

    Args:
        selected_RTN: of each token of each sequence, `[sequences, tokens, neurons]` bool; at least two tokens.
    """
    pairs_RTN = selected_RTN[:, :-1] | selected_RTN[:, 1:]
    return max(pairs_RTN.float().mean().item(), 1 / selected_RTN.shape[-1])
