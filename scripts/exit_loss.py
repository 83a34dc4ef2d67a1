"""The loss over exits: what a model is trained with so that its tokens can leave after any of its blocks.

After "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (Elhoushi et al., 2024, section 4.1): the
model's own norm and head read what lies behind a block, deeper blocks count for more, the exits take turns from step to
step, and blocks are left out at random, deep ones more often. Two things differ. An exit learns from the full model's
probabilities rather than from the text: it is worth as much as it says what the full model says. And weights grow with
the number of blocks rather than with its square, which leaves the first exits, those that save the most, next to
nothing. docs/early-exit.md has what both are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    decoder = model.get_decoder()
    with _caught(decoder.layers, [passed for passed in weights if passed < len(decoder.layers)]) as states:
        logits_NV = model(input_ids=inputs_RT, use_cache=False).logits.flatten(0, 1).float()
    loss = weights[len(decoder.layers)] * cross_entropy(logits_NV, targets_RT.flatten())
    full_NV = logits_NV.detach().softmax(-1)
    for passed, hidden_RTH in states.items():
        early_NV = model.get_output_embeddings()(_final_norm(decoder)(hidden_RTH)).flatten(0, 1).float()
        loss = loss + weights[passed] * cross_entropy(early_NV, full_NV)
    return loss


@torch.no_grad()
def exit_agreement(model: PreTrainedModel, inputs_RT: Tensor) -> dict[int, float]:
    """The share of tokens whose likeliest successor is already the full model's, by number of blocks passed."""
    decoder = model.get_decoder()
    with _caught(decoder.layers, list(range(1, len(decoder.layers)))) as states:
        full_RT = model(input_ids=inputs_RT, use_cache=False).logits.argmax(-1)
    head, norm = model.get_output_embeddings(), _final_norm(decoder)
    return {passed: float((head(norm(one)).argmax(-1) == full_RT).float().mean()) for passed, one in states.items()}


@contextmanager
def left_out(model: PreTrainedModel, most: float) -> Iterator[None]:
    """While this lasts, each sequence skips blocks at random, the deep ones more often."""
    layers = model.get_decoder().layers

    def hook_for(rate: float) -> object:
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


def _final_norm(decoder: torch.nn.Module) -> torch.nn.Module:
    norm: torch.nn.Module = decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm
    return norm


@contextmanager
def _caught(layers: torch.nn.ModuleList, passed: list[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that a forward fills with the hidden states behind so many blocks."""
    states: dict[int, Tensor] = {}

    def hook_for(number: int) -> object:
        def catch(_: object, __: object, output: Tensor) -> None:
            states[number] = output

        return catch

    hooks = [layers[number - 1].register_forward_hook(hook_for(number)) for number in passed]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
