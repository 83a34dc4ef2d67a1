"""Predictors for the blocks of a model, made from text; and what selecting neurons does to the model's perplexity.

Text runs through the model block by block, of which one is in memory at a time. Where a block's feed-forward layer has
exact zeros, what that layer receives makes its predictor. From there on two copies of the text go through the model:
one is computed with all neurons, the other with those that the predictors select.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from swarm.common import console
from swarm.data_structures import Span
from swarm.errors import CheckpointError
from swarm.models.block_loading import load_block, return_freed_memory
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.flash.block_plan import BlockPlan
from swarm.models.flash.neurons.feed_forward_site import DOWN, entry_role, find_sparse_feed_forward
from swarm.models.flash.neurons.predictor import CalibratedPredictor, LowRankPredictor
from swarm.models.flash.neurons.predictor_training import RECALL, DenseFeedForward, make_predictor, training_sequences
from swarm.models.loading.span_loading import SpanAssembly

SEQUENCES, TOKENS = 48, 128
"""Of text. The paper trains with 10,000 samples; an approximation of the products needs fewer."""

ROWS = 8
"""Sequences that are computed at once."""


def calibration_text() -> str:
    """Text that is there wherever this program runs: the reference of Python that comes with the interpreter."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def calibration_tokens(tokenizer: Any, text: str) -> torch.Tensor:
    """`[SEQUENCES, TOKENS]` ids from places all over the text. Raises `CheckpointError` if the text is too short."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(ids) < SEQUENCES * TOKENS:
        raise CheckpointError(
            f"the text for calibration has {len(ids)} tokens; it needs at least {SEQUENCES * TOKENS}: use a longer one"
        )
    starts = torch.linspace(0, len(ids) - TOKENS, SEQUENCES).long()
    return torch.stack([ids[start : start + TOKENS] for start in starts])


def calibrate(
    checkpoint: Checkpoint,
    blocks: Collection[int],
    tokens_RT: torch.Tensor,
    dtype: torch.dtype,
    recall: float = RECALL,
    progress: bool = False,
) -> dict[int, tuple[CalibratedPredictor, str]]:
    """Make predictors for those of `blocks` whose activation yields exact zeros.

    The blocks of the model are loaded one after the other, because what a block receives depends on all before it. If
    the checkpoint is a local folder, the text goes on to the model's end, and the loss of perplexity is that of all
    predictors together, divided evenly among them. Blocks behind the last are not downloaded for that.

    Args:
        tokens_RT: text, from `calibration_tokens`. The loss is measured with that part of it that predictors were not
            trained on.
        dtype: in which the blocks will be computed.

    Returns:
        Block to its predictor, and the digest of the block's weights.

    Raises:
        CheckpointError: weights are missing or unreadable.
    """
    ends = _Ends(checkpoint, dtype)
    exact_RTH = ends.embedded(tokens_RT)
    unseen = slice(training_sequences(len(tokens_RT)), None)
    sparse_RTH = exact_RTH[unseen]
    measured = Path(checkpoint.source).exists()
    last = checkpoint.blocks if measured else max(blocks, default=-1) + 1
    made: dict[int, tuple[CalibratedPredictor, str]] = {}
    title = "Making predictors of neurons" if progress else None
    for block in console.iterate_with_progress(range(last), title, "block"):
        span, plan = _load(checkpoint, block, dtype)
        if plan is None or block not in blocks:
            exact_RTH = _run(span, exact_RTH)
            sparse_RTH = _run(span, sparse_RTH) if made else exact_RTH[unseen]
            continue
        layer = span.layers[0]
        with _recorded(layer.get_submodule(plan.modules[entry_role(plan)])) as received:
            exact_RTH = _run(span, exact_RTH)
        inputs_RTH = torch.cat(received).unflatten(0, tokens_RT.shape)
        calibrated = make_predictor(DenseFeedForward(layer, plan), inputs_RTH, recall)
        with _selected(layer, plan, calibrated.predictor):
            sparse_RTH = _run(span, sparse_RTH)
        made[block] = (calibrated, span.digests[0])
    if not made or not measured:
        return made
    nats = [ends.nats(tokens_RT[unseen], hidden_RTH) for hidden_RTH in (sparse_RTH, exact_RTH[unseen])]
    loss = math.expm1(nats[0] - nats[1]) / len(made)
    return {block: (replace(found, perplexity_loss=loss), digest) for block, (found, digest) in made.items()}


class _Ends:
    """What lies before and behind a model's blocks."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._layer = _StandIn(checkpoint.structure.layer_outputs)
        self._model = load_blockless_model(checkpoint, self._layer, _NoMixin, dtype=dtype).model

    @torch.inference_mode()
    def embedded(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        """What the first block receives, `[sequences, tokens, hidden]`."""
        return torch.cat([self._pass(rows)[0] for rows in tokens_RT.split(ROWS)])

    @torch.inference_mode()
    def nats(self, tokens_RT: torch.Tensor, hidden_RTH: torch.Tensor) -> float:
        """The mean loss of the next token, if this is what the last block returns."""
        sums = 0.0
        for rows, hidden in zip(tokens_RT.split(ROWS), hidden_RTH.split(ROWS), strict=True):
            logits = self._pass(rows, hidden)[1][:, :-1]
            sums += cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum").item()
        return sums / tokens_RT[:, 1:].numel()

    def _pass(self, tokens_RT: torch.Tensor, returned: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the blocks receive, and the logits of what they are taken to return."""
        self._layer.returned = returned
        logits = self._model(input_ids=tokens_RT, use_cache=False).logits
        assert self._layer.received is not None
        return self._layer.received, logits


class _StandIn(nn.Module):
    """Stands for all blocks: keeps what they receive, and returns what it is told to."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.received: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None
        self._outputs = outputs

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.received = hidden_states
        hidden = hidden_states if self.returned is None else self.returned
        return (hidden,) + (None,) * (self._outputs - 1) if self._outputs else hidden


class _NoMixin:
    """Adds nothing to the family's model."""


def _load(checkpoint: Checkpoint, block: int, dtype: torch.dtype) -> tuple[SpanModel, BlockPlan | None]:
    """A block with weights as they are stored, and where its sparse feed-forward layer is."""
    model, digest = load_block(checkpoint, block, dtype)
    plan = find_sparse_feed_forward(model.get_submodule(checkpoint.structure.layers_path)[0])
    assembly = SpanAssembly(checkpoint, Span(block, block + 1))
    assembly.append(model)
    return_freed_memory()
    return SpanModel(assembly.finish(), Span(block, block + 1), [digest], checkpoint.config.hidden_size), plan


def _run(span: SpanModel, hidden_RTH: torch.Tensor) -> torch.Tensor:
    return torch.cat([span.forward(rows) for rows in hidden_RTH.split(ROWS)])


@contextmanager
def _recorded(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """What the module receives meanwhile."""
    received: list[torch.Tensor] = []
    with module.register_forward_pre_hook(lambda _, args: received.append(args[0].flatten(0, -2))):
        yield received


@contextmanager
def _selected(block: nn.Module, plan: BlockPlan, predictor: LowRankPredictor) -> Iterator[None]:
    """Meanwhile, neurons that the predictor does not select are zero."""
    selected: list[torch.Tensor] = []

    def select(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        selected[:] = [predictor.select(args[0])]

    def mask(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].masked_fill(~selected[0], 0),)

    entry, down = (block.get_submodule(plan.modules[role]) for role in (entry_role(plan), DOWN))
    with entry.register_forward_pre_hook(select), down.register_forward_pre_hook(mask):
        yield
