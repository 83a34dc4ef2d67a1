"""The loss over exits: what a model is trained with so that its tokens can leave after any of its blocks.

After "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (Elhoushi et al., 2024, section 4.1): the
model's own norm and head read what lies behind a block, deeper blocks count for more, the exits take turns from step to
step, and blocks are left out at random, deep ones more often. Two things differ. An exit learns from the full model's
probabilities rather than from the text: it is worth as much as it says what the full model says. And weights grow with
the number of blocks rather than with its square, which would leave the exit behind a quarter of twelve blocks, the one
that saves the most, a hundredth of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

EXITS_PER_STEP = 3
"""Exits that are trained in one step; each costs a head."""


def exits_of_step(step: int, blocks: int) -> list[int]:
    """The numbers of blocks behind which this step trains exits, ascending. After a few steps, all had their turn."""
    turns = max(1, math.ceil((blocks - 1) / EXITS_PER_STEP))
    return [passed for passed in range(1, blocks) if passed % turns == step % turns]


def exit_weights(step: int, blocks: int, share: float) -> dict[int, float]:
    """How much each exit of a step counts, and the full model (at `blocks`). They add up to one.

    Args:
        share: of the loss that is the exits', from 0 to 1. With 0, no exits are computed.
    """
    exits = exits_of_step(step, blocks) if share else []
    total = sum(exits)
    return {**{passed: share * passed / total for passed in exits}, blocks: 1 - share if exits else 1.0}


def dropout_rate(block: int, blocks: int, most: float) -> float:
    """How often a block is left out: never the first, and the last one at the rate `most`."""
    return most * math.expm1(math.log(2) * block / max(1, blocks - 1))


def exit_loss(model: PreTrainedModel, inputs_RT: Tensor, targets_RT: Tensor, weights: dict[int, float]) -> Tensor:
    """The full model's loss on the text, and each exit's on the full model's probabilities."""
    *exits, blocks = sorted(weights)
    states, logits_RTV = states_behind(model, inputs_RT, exits)
    logits_NV = logits_RTV.flatten(0, 1)
    loss = weights[blocks] * cross_entropy(logits_NV, targets_RT.flatten())
    full_NV = logits_NV.detach().softmax(-1)
    for passed, hidden_RTH in states.items():
        loss = loss + weights[passed] * cross_entropy(read_hidden(model, hidden_RTH).flatten(0, 1), full_NV)
    return loss


@torch.no_grad()
def exit_agreement(model: PreTrainedModel, inputs_RT: Tensor) -> dict[int, float]:
    """The share of tokens whose likeliest successor is already the full model's, by number of blocks passed."""
    states, logits_RTV = states_behind(model, inputs_RT, range(1, model.config.num_hidden_layers))
    full_RT = logits_RTV.argmax(-1)
    return {
        passed: float((read_hidden(model, hidden_RTH).argmax(-1) == full_RT).float().mean())
        for passed, hidden_RTH in states.items()
    }


def states_behind(model: PreTrainedModel, inputs_RT: Tensor, passed: Iterable[int]) -> tuple[dict[int, Tensor], Tensor]:
    """The hidden states `[R, T, H]` behind these numbers of blocks, and the logits `[R, T, V]` float32."""
    states: dict[int, Tensor] = {}

    def hook_for(number: int) -> Callable[..., None]:
        def catch(_: object, __: object, output: Tensor) -> None:
            states[number] = output

        return catch

    layers = model.get_decoder().layers
    hooks = [layers[number - 1].register_forward_hook(hook_for(number)) for number in passed]
    try:
        logits_RTV = model(input_ids=inputs_RT, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    return states, logits_RTV


def read_hidden(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits `[..., V]`, float32, of hidden states `[..., H]` by the model's own norm and head."""
    decoder = model.get_decoder()
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm
    logits: Tensor = model.get_output_embeddings()(norm(hidden))
    return logits.float()


@contextmanager
def left_out(model: PreTrainedModel, most: float) -> Iterator[None]:
    """While this lasts, each sequence skips blocks at random, the deep ones more often."""
    layers = model.get_decoder().layers

    def hook_for(rate: float) -> Callable[..., Tensor]:
        def skip(_: object, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden_RTH = arguments[0]
            return torch.where(torch.rand(len(hidden_RTH), 1, 1) < rate, hidden_RTH, output)

        return skip

    hooks = [
        layer.register_forward_hook(hook_for(dropout_rate(block, len(layers), most)))
        for block, layer in enumerate(layers)
        if dropout_rate(block, len(layers), most) > 0
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
