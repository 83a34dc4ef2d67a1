"""The linear modules inside a model's blocks: what LoRA can be added to. Found on the meta device, without weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from swarm.models.cutting import families, surgery


@dataclass(frozen=True)
class LoraTargets:
    """Attributes:
    path: where the blocks are from the base model, such as "layers" or "decoder.layers".
    blocks: for each block, module path inside it ("self_attn.q_proj") to (inputs, outputs).
    outside: linear modules that belong to no block, such as a projection of the embeddings.
    is_transposed: whether weights lie as `[inputs, outputs]` (transformers' Conv1D).
    has_stacked_experts: whether experts lie in one tensor, so that they are no linear modules.
    """

    path: str
    blocks: tuple[dict[str, tuple[int, int]], ...]
    outside: tuple[str, ...]
    is_transposed: bool
    has_stacked_experts: bool


def find_lora_targets(config: PreTrainedConfig) -> LoraTargets:
    """All linear modules of the family's base model."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    path, owner, name = surgery.find_layers(model, families.number_of_blocks(config))
    layers = getattr(owner, name)
    blocks = tuple(
        {inside: size for inside, module in layer.named_modules() if (size := linear_size(module)) is not None}
        for layer in layers
    )
    outside = tuple(
        place for place, module in model.named_modules() if linear_size(module) and not place.startswith(f"{path}.")
    )
    return LoraTargets(
        path,
        blocks,
        outside,
        is_transposed=any(isinstance(module, Conv1D) for module in layers.modules()),
        has_stacked_experts=any(tensor.ndim == 3 for tensor in layers.parameters()),
    )


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module, None for any other one."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.nf)
    return None
