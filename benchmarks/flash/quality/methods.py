"""Ways of selecting neurons, and what each does to a model's perplexity; for `benchmarks.flash.quality`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.flash.memory_store import MemoryStore
from scripts.train_demo_model import HELD_OUT, clean
from swarm.models.cutting import cut_layers
from swarm.models.flash.block_plan import BlockPlan, take_out
from swarm.models.flash.neurons.feed_forward_site import ACTIVATION, entry_role, find_sparse_feed_forward
from swarm.models.flash.neurons.predictor import LowRankPredictor, NeuronPredictor
from swarm.models.flash.neurons.predictor_training import (
    RECALL,
    DenseFeedForward,
    TrainingOptions,
    energy,
    make_predictor,
    svd_predictor,
    threshold_for,
    trained_predictor,
)
from swarm.models.flash.neurons.sparse_feed_forward import SpanShared, SparseOptions, attach

WINDOW = 256
TRAINING_WINDOWS, CALIBRATION_WINDOWS = 24, 8
RECALLS = (0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
RANKS = (16, 32, 64)

TOKENS, SESSIONS = (1, 2, 4, 5, 8, 16), (2, 4, 8)
"""Tokens of one sequence, and sequences with one token each, of which it is told what they need together."""


@dataclass(frozen=True)
class Layer:
    """A block of the model, its feed-forward layer whole, and what that received for texts.

    Attributes:
        training_TH: to make predictors with.
        calibration_TH: to find thresholds with; `contributions_TN` are those of its neurons.
        inputs_RTH: both, as sequences.
    """

    block: nn.Module
    plan: BlockPlan
    dense: DenseFeedForward
    inputs_RTH: torch.Tensor
    training_TH: torch.Tensor
    calibration_TH: torch.Tensor
    contributions_TN: torch.Tensor


class Oracle:
    """Selects the neurons that contribute more than a threshold."""

    memory_bytes = 0

    def __init__(self, dense: DenseFeedForward, threshold: float) -> None:
        self._dense, self._threshold = dense, threshold

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return self._dense.contributions(hidden_TH) > self._threshold


class ActivationPredictor:
    """Computes the activation itself, from all gates (or up projections) in memory: nothing is missed or read in vain.

    With a gate, this is the paper's alternative for Llama 2 (appendix C.5): exact, for the memory of all gates. Without
    one it is the oracle that predictors are compared with.

    Args:
        weight: of the gate or up projection, `[neurons, hidden]`.
        bias: `[neurons]`, or None.
        activation: of the layer.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: nn.Module) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    @property
    def memory_bytes(self) -> int:
        return self._weight.nbytes

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        selected: torch.Tensor = self._activation(functional.linear(hidden_TH, self._weight, self._bias)) != 0
        return selected


class Observed:
    """A predictor whose selections are compared with the truth.

    Attributes:
        selected: of each forward, `[tokens, neurons]`.
        active, missed: active neurons, and those of them that were not selected, summed over tokens.
        energy, found: squared contributions, and those of selected neurons.
    """

    def __init__(self, predictor: NeuronPredictor, dense: DenseFeedForward) -> None:
        self._predictor, self._dense = predictor, dense
        self.memory_bytes = predictor.memory_bytes
        self.selected: list[torch.Tensor] = []
        self.active = self.missed = 0
        self.energy = self.found = 0.0

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        selected_TN = self._predictor.select(hidden_TH)
        contributions_TN = self._dense.contributions(hidden_TH)
        self.selected.append(selected_TN)
        self.active += int((contributions_TN > 0).sum())
        self.missed += int((contributions_TN[~selected_TN] > 0).sum())
        self.energy += float(energy(contributions_TN).sum())
        self.found += float(energy(contributions_TN)[selected_TN].sum())
        return selected_TN

    def figures(self) -> Figures:
        selected_TN = torch.cat(self.selected)
        places = selected_TN.numel()
        return Figures(
            active=self.active / places,
            selected=selected_TN.float().mean().item(),
            recall=1 - self.missed / max(1, self.active),
            energy=self.found / self.energy,
            missed=self.missed / places,
        )


@dataclass(frozen=True)
class Figures:
    """Of a predictor in one layer: shares of neurons (active, selected, active but missed) and of what they are."""

    active: float
    selected: float
    recall: float
    energy: float
    missed: float


@dataclass(frozen=True)
class Result:
    """Of a method and a target for recall.

    Attributes:
        ratio: the perplexity beside the exact one.
        together: the shares of neurons that several tokens need.
    """

    method: str
    target: float
    ratio: float
    layers: tuple[Figures, ...]
    together: dict[str, float]
    memory_share: float

    def mean(self, name: str) -> float:
        return sum(getattr(layer, name) for layer in self.layers) / len(self.layers)


# Models and texts


class Subject:
    """A model whose blocks are all sparse, and its texts."""

    @torch.no_grad()
    def __init__(self, folder: Path, texts: Sequence[Path], windows: int) -> None:
        self.name = folder.name
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        known, unseen = zip(*(_split(path) for path in texts), strict=True)
        training = _windows(tokenizer, "".join(known), TRAINING_WINDOWS + CALIBRATION_WINDOWS)
        self.held_out = _windows(tokenizer, "".join(unseen), windows)
        _, owner, name = cut_layers.find_layers(self.model, self.model.config.num_hidden_layers)
        blocks: Any = getattr(owner, name)
        plans = [find_sparse_feed_forward(block) for block in blocks]
        if None in plans:
            raise SystemExit(f"{folder} has blocks whose activation is never exactly zero")
        self.layers = [
            _layer(block, plan, inputs_RTH)
            for block, plan, inputs_RTH in zip(blocks, plans, self._inputs(blocks, plans, training), strict=True)
        ]
        self.exact = self.perplexity()

    def perplexity(self) -> float:
        nats = 0.0
        for ids in self.held_out.split(4):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
            nats += functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
        return math.exp(nats / self.held_out[:, 1:].numel())

    def measure(self, method: str, target: float, predictors: Sequence[NeuronPredictor]) -> Result:
        observed = [Observed(one, layer.dense) for one, layer in zip(predictors, self.layers, strict=True)]
        with computed_with(self.layers, observed):
            perplexity = self.perplexity()
        by_layer = [needed_together(sequences_of(one, len(self.held_out))) for one in observed]
        together = {name: sum(one[name] for one in by_layer) / len(by_layer) for name in by_layer[0]}
        weights = sum(layer.dense.record_values * len(layer.dense.weight) for layer in self.layers)
        memory = sum(one.memory_bytes for one in predictors) / (4 * weights)
        layers = tuple(one.figures() for one in observed)
        return Result(method, target, perplexity / self.exact, layers, together, memory)

    def _inputs(self, blocks: Any, plans: Any, windows: torch.Tensor) -> list[torch.Tensor]:
        """What each feed-forward layer receives, `[windows, tokens, hidden]`."""
        found: list[list[torch.Tensor]] = [[] for _ in plans]
        handles = []
        for number, (block, plan) in enumerate(zip(blocks, plans, strict=True)):
            entry = block.get_submodule(plan.modules[entry_role(plan)])
            handles.append(entry.register_forward_pre_hook(lambda _, args, n=number: found[n].append(args[0])))
        for ids in windows.split(4):
            self.model(input_ids=ids[:, :-1], use_cache=False)
        for handle in handles:
            handle.remove()
        return [torch.cat([one.flatten(0, -2) for one in parts]).unflatten(0, (len(windows), -1)) for parts in found]


def _split(path: Path) -> tuple[str, str]:
    """The part of a text that models were trained on, and its end, which they were not."""
    text = clean(path.read_text("utf-8-sig"))
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    return text[:cut], text[cut:]


def _windows(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    """`[count, WINDOW + 1]` token ids, spread over the text."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    starts = torch.linspace(0, len(ids) - WINDOW - 1, count).long()
    return torch.stack([ids[start : start + WINDOW + 1] for start in starts])


def _layer(block: nn.Module, plan: BlockPlan, inputs_RTH: torch.Tensor) -> Layer:
    dense = DenseFeedForward(block, plan)
    # Every fourth window is for calibration, since neighbors are of one text.
    is_calibration = torch.arange(len(inputs_RTH)) % 4 == 3
    ordered = torch.cat([inputs_RTH[~is_calibration], inputs_RTH[is_calibration]])
    unseen_TH = inputs_RTH[is_calibration].flatten(0, 1)
    training_TH = inputs_RTH[~is_calibration].flatten(0, 1)
    return Layer(block, plan, dense, ordered, training_TH, unseen_TH, dense.contributions(unseen_TH))


@contextmanager
def computed_with(layers: Sequence[Layer], predictors: Sequence[NeuronPredictor]) -> Iterator[None]:
    """Meanwhile, every block computes the neurons that its predictor selects, from records in memory."""
    shared, everything = SpanShared(), []
    for layer, predictor in zip(layers, predictors, strict=True):
        state = layer.block.state_dict()
        layout = layer.plan.layout({name: tuple(state[name].shape) for name in layer.plan.axes}, torch.float32)
        resident = {name: state[name] for name in layer.plan.resident}
        store = MemoryStore(layout, state)
        taken = take_out(layer.block, layer.plan)
        everything.append(taken)
        options = SparseOptions(capacity=layout.count, exact_from=1 << 30)
        attach(layer.block, layer.plan, taken, resident, predictor, store, options, shared)
    try:
        yield
    finally:
        for layer, taken in zip(layers, everything, strict=True):
            for role, module in taken.items():
                layer.block.set_submodule(layer.plan.modules[role], module)


def sequences_of(observed: Observed, count: int) -> torch.Tensor:
    """What was selected for the tokens of each of `count` sequences, `[count, tokens, neurons]`."""
    return torch.cat(observed.selected).unflatten(0, (count, -1))


def needed_together(selected_RTN: torch.Tensor) -> dict[str, float]:
    """The shares of neurons that tokens of one sequence need together, and tokens of several sequences."""
    found = {}
    for count in TOKENS:
        union_RTN = selected_RTN.unfold(1, count, 1).any(-1)
        found[f"{count} of one sequence"] = union_RTN.float().mean().item()
    for count in SESSIONS:
        if count <= len(selected_RTN):
            groups = selected_RTN[: len(selected_RTN) // count * count].unflatten(0, (-1, count))
            found[f"1 of each of {count}"] = groups.any(1).float().mean().item()
    return found


# Methods

Method = Callable[[Layer], Callable[[float], NeuronPredictor]]
"""For a layer, what makes a predictor for a recall."""


def low_rank(make: Callable[[Layer], LowRankPredictor]) -> Method:
    def prepared(layer: Layer) -> Callable[[float], NeuronPredictor]:
        found = make(layer)
        scores_TN = found.scores(layer.calibration_TH)

        def at(recall: float) -> NeuronPredictor:
            threshold = threshold_for(scores_TN, layer.contributions_TN, recall)
            return LowRankPredictor(found.first, found.second, found.bias, threshold)

        return at

    return prepared


def oracle(layer: Layer) -> Callable[[float], NeuronPredictor]:
    contributions_TN = layer.contributions_TN
    return lambda recall: Oracle(layer.dense, threshold_for(contributions_TN, contributions_TN, recall))


def gate(layer: Layer) -> Callable[[float], NeuronPredictor]:
    activation = layer.block.get_submodule(layer.plan.modules[ACTIVATION])
    return lambda recall: ActivationPredictor(layer.dense.weight, layer.dense.bias, activation)


def default(layer: Layer) -> Callable[[float], NeuronPredictor]:
    return lambda recall: make_predictor(layer.dense, layer.inputs_RTH, recall).predictor


def trained(layer: Layer, rank: int) -> LowRankPredictor:
    start = svd_predictor(layer.dense, rank, layer.training_TH)
    return trained_predictor(start, layer.dense, layer.training_TH, TrainingOptions())


def methods(ranks: Sequence[int]) -> dict[str, Method]:
    found: dict[str, Method] = {"oracle": oracle, "gate": gate}
    for rank in ranks:
        found[f"svd {rank}"] = low_rank(lambda layer, r=rank: svd_predictor(layer.dense, r))
        found[f"inputs svd {rank}"] = low_rank(lambda layer, r=rank: svd_predictor(layer.dense, r, layer.training_TH))
        found[f"trained {rank}"] = low_rank(lambda layer, r=rank: trained(layer, r))
    return {**found, "default": default}


@torch.no_grad()
def measure(subject: Subject, ranks: Sequence[int], recalls: Sequence[float]) -> list[Result]:
    results = []
    for name, method in methods(ranks).items():
        prepared = [method(layer) for layer in subject.layers]
        for recall in (RECALL,) if name in ("gate", "default") else recalls:
            result = subject.measure(name, recall, [one(recall) for one in prepared])
            print(f"{subject.name}: {name} at {recall}: x {result.ratio:.4f}", flush=True)
            results.append(result)
    return results
