"""The linear modules to which LoRA can be added, found on the meta device without loading weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from swarm.models.cutting import cut_layers, families


@dataclass(frozen=True)
class LoraTargets:
    """The linear modules of a family's base model.

    Attributes:
        layers_path: path from the base model to its list of blocks, such as "layers" or "decoder.layers".
        blocks: for each block, path of the module inside it ("self_attn.q_proj") to (inputs, outputs).
        outside_blocks: linear modules that belong to no block, such as a projection of the embeddings.
        is_transposed: whether weights are stored as `[inputs, outputs]` (transformers' Conv1D).
        has_stacked_experts: whether all experts are stored in one tensor, so that they are not linear modules.
    """

    layers_path: str
    blocks: tuple[dict[str, tuple[int, int]], ...]
    outside_blocks: tuple[str, ...]
    is_transposed: bool
    has_stacked_experts: bool


def find_lora_targets(config: PreTrainedConfig) -> LoraTargets:
    """Find all linear modules of the family's base model."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    layers_path, owner, name = cut_layers.find_layers(model, families.number_of_blocks(config))
    layers = getattr(owner, name)
    blocks = tuple(
        {path: size for path, module in layer.named_modules() if (size := linear_size(module)) is not None}
        for layer in layers
    )
    outside_blocks = tuple(
        path for path, module in model.named_modules() if linear_size(module) and not path.startswith(f"{layers_path}.")
    )
    return LoraTargets(
        layers_path,
        blocks,
        outside_blocks,
        is_transposed=any(isinstance(module, Conv1D) for module in layers.modules()),
        has_stacked_experts=any(tensor.ndim == 3 for tensor in layers.parameters()),
    )


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module, None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.nf)
    return None
