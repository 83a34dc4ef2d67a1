"""The structure of a model, found on the meta device (which holds no data) before any weights are read."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.attention.sequence_states import StagedStates, StateBatch, StatefulCache
from swarm.models.cutting import cut_layers, families


@dataclass(frozen=True)
class ModelStructure:
    """Where a model keeps its layers, what they return, and how large they are.

    Attributes:
        layers_path: path from the family's base model to its decoder layers, such as "layers" or "decoder.layers".
        layer_outputs: what a layer returns: 0 for a tensor, n for a tuple of n values, of which the first is a tensor.
        block_parameters: number of weight values in each block.
        cached_values: number of values that one position takes in the attention cache of each block.
        state_values: number of values that each block keeps of a sequence, however long it is.
    """

    layers_path: str
    layer_outputs: int
    block_parameters: tuple[int, ...]
    cached_values: tuple[int, ...]
    state_values: tuple[int, ...]


def inspect_model(config: PreTrainedConfig) -> ModelStructure:
    """Build the model of `config` without data and run one token through its first layers."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    blocks = families.number_of_blocks(config)
    path, _, _ = cut_layers.find_layers(model, blocks)
    layers = model.get_submodule(path)
    outputs = [0]

    def count_outputs(module: nn.Module, args: Any, output: Any) -> None:
        outputs[0] = len(output) if isinstance(output, tuple) else 0

    layers[0].register_forward_hook(count_outputs)
    cache = _TokenCache(blocks)
    _run_one_token(model, config, cache)
    kinds = getattr(config, "layer_types", None) or ["attention"] * blocks
    for kind in set(kinds):
        first = kinds.index(kind)
        if not cache.was_written(first):  # an earlier layer failed
            _run_one_token(cut_layers.slice_model(model, path, first, first + 1), config, cache)
    parameters = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    cached, states = (
        tuple(
            of(block) or max(of(other) for other in range(blocks) if kinds[other] == kinds[block])
            for block in range(blocks)
        )
        for of in (cache.cached_values, cache.state_values)
    )
    if not any(cached) and not any(
        states
    ):  # an upper bound: no family caches more than a key and a value of full width
        cached = (2 * config.hidden_size,) * blocks
    return ModelStructure(path, outputs[0], parameters, cached, states)


class _TokenCache(StatefulCache, PaddedKV):
    """The cache of one token, which shows what each layer keeps."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._staged = StagedStates(1)
        self._states = StateBatch([(self._staged, 0, 1)])

    @property
    def states(self) -> StateBatch:
        return self._states

    def was_written(self, block: int) -> bool:
        return bool(self.cached_values(block) or self.state_values(block))

    def cached_values(self, block: int) -> int:
        layer: Any = self.layers[block]
        if not layer.is_initialized:
            return 0
        stored = (layer.keys, layer.values, layer.index_keys)
        return sum(one.shape[1] * one.shape[3] for one in stored if one is not None)

    def state_values(self, block: int) -> int:
        self._states.finish()
        return sum(state.numel() for (layer, _, _), state in self._staged.result.items() if layer == block)


def _run_one_token(model: Any, config: PreTrainedConfig, cache: PaddedKV) -> None:
    # A mixture of experts routes by values, which the meta device does not have. The run then fails in the first layer,
    # after its attention, with whatever error the family's code raises. Such layers return tensors, and by then the
    # cache has been written.
    with suppress(Exception), torch.device("meta"):
        model(inputs_embeds=torch.empty(1, 1, config.hidden_size), past_key_values=cache, use_cache=True)


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
