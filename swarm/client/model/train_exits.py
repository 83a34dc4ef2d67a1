"""Lenses and classifiers for early exit: training them on hidden states that the swarm computes, saving and loading.

A lens is learned by distillation: what the model's norm and head read through it is to be as near as possible to what
they read behind the last block ("Eliciting Latent Predictions from Transformers with the Tuned Lens", Belrose et al.,
2023, section 2). It begins as no lens at all. A classifier is a logistic regression over the newest tokens: is the
token that the lens leads to the full model's?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from swarm.client.tuning.virtual_tokens import virtual_token_layout
from swarm.common import console
from swarm.errors import UsageError
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, ExitLens, TrainedExits

ExitKind = Literal["lens", "classifier"]

WINDOW_TOKENS = 256
"""Tokens of a sequence into which texts are cut."""

BATCH_WINDOWS = 8
HELD_OUT = 10
"""Every tenth sequence is held out, to see what was learned."""


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


@dataclass(frozen=True)
class ExitQuality:
    """What a token that leaves in front of a block is worth, on sequences that were held out.

    A lens that does not help there is not used.

    Attributes:
        block: in front of which it leaves.
        before, after: share of tokens whose successor is the full model's, without and with the lens.
    """

    block: int
    before: float
    after: float


class ExitsMixin:
    """Mixin of models whose tokens may leave early.

    Attributes:
        exits: lenses and classifiers with which they do; None if nothing was trained or loaded.
    """

    exits: TrainedExits | None = None

    def train_exits(
        self,
        texts: Sequence[torch.Tensor],
        *,
        boundaries: Sequence[int] | None = None,
        kind: ExitKind = "lens",
        progress: Callable[[int, int], object] | None = None,
    ) -> list[ExitQuality]:
        """Train what lets tokens leave early, on hidden states that the swarm computes, and use it from now on.

        Args:
            texts: token ids, in any number of tensors; about 40,000 tokens do for a small model.
            boundaries: blocks in front of which tokens may leave; by default those where servers begin or end now.
            kind: "lens" for maps by which the model's head can read early hidden states; "classifier" for what
                `EarlyExit(confidence="classifier")` asks, after the lenses.
            progress: is told how many parts of the work are done, and how many there are; by default, a bar on the
                terminal shows it, or lines in the log.

        Returns:
            for each boundary, what its tokens are worth.

        Raises:
            UsageError: there is not enough text, or no such boundary.
        """
        with ExitStack() as stack:
            if progress is None:
                progress = ShownProgress(stack, "Training exits")
            exits, quality = train_exits(self, texts, boundaries, kind, progress)
        self._use(exits)
        return quality

    def save_exits(self, folder: str | Path) -> None:
        """Write what `train_exits` made into `folder`. Raises `UsageError` if there is nothing."""
        if self.exits is None:
            raise UsageError("nothing was trained: call model.train_exits first")
        self.exits.save(folder)

    def load_exits(self, folder: str | Path) -> None:
        """Read what `save_exits` wrote. Raises `AdapterMismatch` or `AdapterError`."""
        self._use(TrainedExits.load(folder, base_model(self)))

    def _use(self, exits: TrainedExits) -> None:
        """Keep them where the model's head is, so that `generate` need not copy them each time."""
        object.__setattr__(self, "exits", exits.to(self.device))  # type: ignore[attr-defined]


class ShownProgress:
    """Shows how many parts of the training are done, until `stack` closes."""

    def __init__(self, stack: ExitStack, title: str) -> None:
        self._stack, self._title = stack, title
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(console.progress_bar(self._title, total, "part"))
        self._bar.update()


def train_exits(
    model: Any,
    texts: Sequence[torch.Tensor],
    boundaries: Sequence[int] | None,
    kind: ExitKind,
    progress: Callable[[int, int], object],
) -> tuple[TrainedExits, list[ExitQuality]]:
    """Train exits of one kind for these boundaries; the others stay as they are.

    Args:
        progress: is told how many parts of the work are done, and how many there are.

    Raises `UsageError` if there is not enough text, or no such boundary.
    """
    if kind not in get_args(ExitKind):
        raise UsageError(f"kind={kind!r} is not one of {', '.join(get_args(ExitKind))}")
    blocks = model.swarm.blocks
    chosen = sorted(set(boundaries if boundaries is not None else model.swarm.boundaries()))
    if not chosen or not all(0 < block < blocks for block in chosen):
        raise UsageError(f"boundaries={chosen}: tokens can leave in front of blocks 1 to {blocks - 1}")
    parts = list(batches(texts, model.config))
    base, total = base_model(model), len(parts) + len(chosen)
    fits = {block: LensFit(base.hidden_size, lambda hidden_NH: read_tokens(model, hidden_NH)) for block in chosen}
    held_out: dict[int, list[torch.Tensor]] = {block: [] for block in (*chosen, blocks)}
    seen: dict[int, list[torch.Tensor]] = {block: [] for block in held_out}
    for number, tokens_RT in enumerate(parts):
        states = hidden_states(model, tokens_RT, [*chosen, blocks])
        is_held_out = held_out_part(number, len(parts))
        for block, one in states.items():
            _keep((held_out if is_held_out else seen)[block], one.flatten(0, 1).cpu())
        if kind == "lens" and not is_held_out:
            for block, fit in fits.items():
                inputs_NH, final_NH = torch.cat(seen[block]), torch.cat(seen[blocks])
                fit.learn(inputs_NH, final_NH, tokens_RT.numel(), number / len(parts))
        progress(number + 1, total)
    before = (model.exits or TrainedExits(base)).to(torch.device("cpu"))  # as the hidden states that are kept
    lenses = before.lenses if kind == "classifier" else {b: one for b, one in before.lenses.items() if b not in chosen}
    lenses, classifiers, quality = dict(lenses), dict(before.classifiers), []
    for number, block in enumerate(chosen):
        without = after = _agreement(model, TrainedExits(base), block, held_out)
        if kind == "classifier":
            right_N = _agrees(model, before, block, seen)
            classifiers[block] = fit_classifier(torch.cat(seen[block]), right_N)
            after = _agreement(model, before, block, held_out)
        else:
            lens = fits[block].lens()
            with_lens = _agreement(model, TrainedExits(base, {block: lens}), block, held_out)
            if with_lens > without:  # a model that was trained for exits may be read best without a lens
                lenses[block], after = lens, with_lens
        quality.append(ExitQuality(block, without, after))
        progress(len(parts) + number + 1, total)
    return TrainedExits(base, lenses, classifiers), quality


def base_model(model: Any) -> BaseModel:
    """What exits of a model are bound to."""
    identity = model.swarm.identity
    return BaseModel(identity.name, identity.revision, model.config.get_text_config().hidden_size, identity.blocks)


def hidden_states(model: Any, tokens_RT: torch.Tensor, blocks: Sequence[int]) -> dict[int, torch.Tensor]:
    """The hidden states of sequences in front of each of `blocks` (ascending; the last may be the number of blocks).

    Virtual tokens of prompt tuning stand before the sequences, and are left out of what is returned.
    """
    tokens_RT, virtual = tokens_RT.to(model.device), 0
    inputs = {"input_ids": tokens_RT}
    if model.prompts is not None:
        layout = virtual_token_layout(len(model.prompts), len(tokens_RT), None)
        embedded_RTH = model.get_input_embeddings()(tokens_RT)
        inputs, virtual = {"inputs_embeds": layout.insert(embedded_RTH, model.prompts)}, layout.count
    found: dict[int, torch.Tensor] = {}

    def compute(hidden_RTH: torch.Tensor) -> torch.Tensor:
        start = 0
        for block in blocks:
            hidden_RTH, start = model.remote_blocks[start:block](hidden_RTH), block
            found[block] = hidden_RTH[:, virtual:]
        return hidden_RTH

    with torch.no_grad(), model.remote_layer.replaced(compute):
        model(**inputs, use_cache=False)
    return found


def read_hidden(model: Any, hidden_RTH: torch.Tensor) -> torch.Tensor:
    """The logits `[R, T, V]` float32 of hidden states behind the last block, or as if they were.

    Gradients reach hidden states that require some.
    """
    nothing_RT = torch.zeros(hidden_RTH.shape[:2], dtype=torch.long, device=hidden_RTH.device)
    with torch.set_grad_enabled(hidden_RTH.requires_grad), model.remote_layer.replaced(lambda _: hidden_RTH):
        logits_RTV: torch.Tensor = model(input_ids=nothing_RT, use_cache=False).logits.float()
    return logits_RTV


def _agrees(model: Any, exits: TrainedExits, block: int, states: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """For each token, whether its successor in front of `block` is that behind the last block, `[N]` bool."""
    lens, right = exits.lenses.get(block), []
    for hidden_NH, final_NH in zip(states[block], states[model.swarm.blocks], strict=True):
        early_NH = lens(hidden_NH) if lens is not None else hidden_NH
        both = [read_tokens(model, one).argmax(-1) for one in (early_NH, final_NH)]
        right.append((both[0] == both[1]).cpu())
    return torch.cat(right)


def _agreement(model: Any, exits: TrainedExits, block: int, states: dict[int, list[torch.Tensor]]) -> float:
    """The share of tokens that agree."""
    return float(_agrees(model, exits, block, states).float().mean())


def read_tokens(model: Any, hidden_NH: torch.Tensor) -> torch.Tensor:
    """The logits `[N, V]` float32 of tokens, on the model's device; hidden states may be anywhere.

    Each is read as a text of its own, because a model with learned positions has no texts of any length.
    """
    return read_hidden(model, hidden_NH.unsqueeze(1).to(model.device))[:, 0]


def _keep(kept: list[torch.Tensor], rows: torch.Tensor) -> None:
    """Remember the newest tokens."""
    kept.append(rows)
    while sum(map(len, kept)) > KEPT_TOKENS and len(kept) > 1:
        del kept[0]


def held_out_part(number: int, parts: int) -> bool:
    """Whether nothing is learned from part `number` of so many."""
    return number % HELD_OUT == HELD_OUT - 1 or number == parts - 1


def batches(texts: Sequence[torch.Tensor], config: Any) -> Iterator[torch.Tensor]:
    """Sequences of the same length `[R, T]`, a few at a time; at least two parts.

    Raises:
        UsageError: there is not enough text.
    """
    length = min(WINDOW_TOKENS, getattr(config.get_text_config(), "max_position_embeddings", None) or WINDOW_TOKENS)
    tokens = torch.cat([text.flatten() for text in texts]) if texts else torch.empty(0, dtype=torch.long)
    length = max(2, min(length, len(tokens) // (2 * BATCH_WINDOWS)))
    if len(tokens) < 2 * BATCH_WINDOWS * length:
        raise UsageError(f"the texts have to be longer: at least {2 * BATCH_WINDOWS} sequences of a few tokens each")
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    for first in range(0, len(windows) - BATCH_WINDOWS + 1, BATCH_WINDOWS):
        yield windows[order[first : first + BATCH_WINDOWS]]


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
