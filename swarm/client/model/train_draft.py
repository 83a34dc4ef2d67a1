"""`model.train_draft`: the client teaches a draft head what the swarm's last block makes of texts.

The texts go through the swarm once. Then the head learns here, as EAGLE's does (Li et al., 2024, section 4.2): to guess
the next hidden state, and, with a tenth of the weight, the probabilities that the model's head reads from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.client.model.train_exits import (
    STEP_TOKENS,
    ShownProgress,
    base_model,
    batches,
    held_out_part,
    hidden_states,
    read_tokens,
)
from swarm.errors import UsageError
from swarm.models.adapters.adapter_files import AdapterSource
from swarm.models.draft_head import DraftHead

PASSES = 6
"""How often the head sees each text."""

LEARNING_RATE = 1.5
"""At its highest, divided by the model's width."""

WARM_UP_STEPS = 20
TOKENS_WEIGHT = 0.1
"""Of the probabilities, beside the hidden states."""

DEPTHS = 4
"""Guesses one behind the other over which the head is judged."""


@dataclass(frozen=True)
class DraftQuality:
    """How good a draft head is on texts that were held out.

    Attributes:
        before, after: training. For each of a few guesses one behind the other, the share that the model would have
            chosen, too, if the guesses before are right.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]


class DraftMixin:
    """Mixin of models that may have a draft head.

    Attributes:
        draft_head: for `generate(draft="head")`; None if nothing was trained or loaded.
    """

    draft_head: DraftHead | None = None

    def train_draft(
        self,
        texts: Sequence[torch.Tensor],
        *,
        passes: int = PASSES,
        progress: Callable[[int, int], object] | None = None,
    ) -> DraftQuality:
        """Train a draft head on hidden states that the swarm computes, and use it from now on.

        A head that was loaded or trained before learns further. The hidden states of all texts are kept meanwhile: for
        a model of 4,096 values a token in half precision, 8 KB for each token.

        Args:
            texts: token ids, in any number of tensors; best what the model itself writes. About 160,000 tokens do for a
                small model.
            passes: how often the head sees each text.
            progress: is told how many parts of the work are done, and how many there are; by default, a bar on the
                terminal shows it, or lines in the log.

        Returns:
            what it is worth on texts that were held out.

        Raises:
            UsageError: there is not enough text.
        """
        with ExitStack() as stack:
            if progress is None:
                progress = ShownProgress(stack, "Training the draft head")
            head, quality = train_draft(self, texts, passes, progress)
        self._use_draft(head)
        return quality

    def save_draft(self, folder: str | Path) -> None:
        """Write the draft head into `folder`. Raises `UsageError` if there is none."""
        if self.draft_head is None:
            raise UsageError("this model has no draft head to save; call model.train_draft first")
        self.draft_head.save(folder)

    def load_draft(self, name: str | Path, *, revision: str | None = None) -> None:
        """Read what `save_draft` wrote.

        Args:
            name: the folder, or a repository on the hub.
            revision: of the repository.

        Raises:
            AdapterMismatch: it was trained for another model or revision.
            AdapterError: the file is missing or broken.
        """
        self._use_draft(DraftHead.load(AdapterSource(str(name), revision), base_model(self), _embedding_size(self)))

    def _use_draft(self, head: DraftHead) -> None:
        """Keep it as the model computes, but not among the model's parameters."""
        model: Any = self
        object.__setattr__(self, "draft_head", head.to(model.device, model.dtype).requires_grad_(False).eval())


def train_draft(
    model: Any, texts: Sequence[torch.Tensor], passes: int, progress: Callable[[int, int], object]
) -> tuple[DraftHead, DraftQuality]:
    """Train the model's draft head, or a new one: the head in float32, and what it is worth.

    Raises `UsageError` if there is not enough text.
    """
    parts = list(batches(texts, model.config))
    seen, held_out = list[_Part](), list[_Part]()
    for number, tokens_RT in enumerate(parts):
        hidden_RTH = hidden_states(model, tokens_RT, [model.swarm.blocks])[model.swarm.blocks]
        (held_out if held_out_part(number, len(parts)) else seen).append(_Part(tokens_RT, hidden_RTH.cpu()))
        progress(number + 1, len(parts) + passes)
    head = DraftHead(base_model(model), _embedding_size(model)).to(model.device)
    if model.draft_head is not None:
        head.load_state_dict(model.draft_head.state_dict())
    before = _shares(model, head, held_out)
    fit = _Fit(model, head, passes * len(seen))
    order = torch.Generator().manual_seed(0)
    for done in range(passes):
        for number in torch.randperm(len(seen), generator=order).tolist():
            fit.learn(seen[number])
        progress(len(parts) + done + 1, len(parts) + passes)
    return head, DraftQuality(before, _shares(model, head, held_out))


@dataclass(frozen=True, eq=False)
class _Part:
    """Sequences `[R, T]`, and the hidden states behind the last block, `[R, T, H]`, in main memory."""

    tokens_RT: torch.Tensor
    hidden_RTH: torch.Tensor


class _Fit:
    """A draft head while it learns.

    Args:
        steps: how many there will be.
    """

    def __init__(self, model: Any, head: DraftHead, steps: int) -> None:
        self._model, self._head, self._steps, self._done = model, head, steps, 0
        self._weights = [*head.parameters()]
        self._optimizer = torch.optim.Adam(self._weights, betas=(0.9, 0.95))
        self._draw = torch.Generator().manual_seed(0)

    def learn(self, part: _Part) -> None:
        """Take a step."""
        share = self._done / self._steps
        rate = min(1.0, (self._done + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * share)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = rate * LEARNING_RATE / self._head.base.hidden_size
        hidden_RTH = part.hidden_RTH.to(self._model.device)
        target_RTH = hidden_RTH[:, 1:]
        embedded_RTE = _embedded(self._model, part.tokens_RT[:, 1:])
        chosen_N = torch.randint(target_RTH.shape[0] * target_RTH.shape[1], (STEP_TOKENS,), generator=self._draw)
        with torch.no_grad():
            goal_NV = read_tokens(self._model, target_RTH.flatten(0, 1)[chosen_N]).softmax(-1)
            wanted_RTH = target_RTH.float()
            size = wanted_RTH.square().mean().sqrt()
        with torch.enable_grad():
            found_RTH = self._head(hidden_RTH[:, :-1].float(), embedded_RTE)
            found_NV = read_tokens(self._model, found_RTH.flatten(0, 1)[chosen_N].to(target_RTH.dtype))
            loss = nn.functional.smooth_l1_loss(found_RTH / size, wanted_RTH / size)
            loss = loss + TOKENS_WEIGHT * nn.functional.cross_entropy(found_NV, goal_NV)
            # Not backward(): the model's own head is to get no gradients.
            for weight, gradient in zip(self._weights, torch.autograd.grad(loss, self._weights), strict=True):
                weight.grad = gradient
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._done += 1


def _embedding_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[1])


@torch.no_grad()
def _embedded(model: Any, tokens_RT: torch.Tensor) -> torch.Tensor:
    """Tokens as the head takes them while it learns, `[R, T, E]` float32."""
    embedded_RTE: torch.Tensor = model.get_input_embeddings()(tokens_RT.to(model.device)).float()
    return embedded_RTE


@torch.no_grad()
def _shares(model: Any, head: DraftHead, parts: Sequence[_Part]) -> tuple[float, ...]:
    """For each depth, the share of guesses that are the model's choice."""
    right: list[list[torch.Tensor]] = [[] for _ in range(DEPTHS)]
    texts = [(one, hidden) for part in parts for one, hidden in zip(part.tokens_RT, part.hidden_RTH, strict=True)]
    for tokens_T, real_TH in texts:
        chosen_T = read_tokens(model, real_TH).argmax(-1)
        hidden_1TH = real_TH.unsqueeze(0).to(model.device, torch.float32)
        for depth in range(1, min(DEPTHS, len(tokens_T) - 1) + 1):
            hidden_1TH = head(hidden_1TH[:, :-1], _embedded(model, tokens_T[None, depth:]))
            guessed_T = read_tokens(model, hidden_1TH[0].to(real_TH.dtype)).argmax(-1)
            right[depth - 1].append(guessed_T == chosen_T[depth:])
    return tuple(float(torch.cat(one).float().mean()) for one in right if one)
