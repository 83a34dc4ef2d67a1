"""A model's final norm and head, by which early hidden states are read. The embeddings are not kept."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting import cut_layers, families
from swarm.models.exits.direct_reading import DirectReading
from swarm.models.weights import frozen_linear


class ModelHead:
    """From hidden states behind the last block, or as if they were, to logits: the family's own code.

    Args:
        checkpoint: the model, of which final norm and head are read.
        dtype, device: to compute in and on.

    Raises:
        CheckpointError: the checkpoint lacks tensors of them.
        UnsupportedModel: the family has no language model.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._layer = _GivenStates(checkpoint.structure.layer_outputs)
        loaded = load_blockless_model(checkpoint, self._layer, _PlainModel, dtype=dtype)
        self._model = loaded.model
        self._embedding_width: int = self._model.get_input_embeddings().weight.shape[1]
        self._read = DirectReading(self._read_whole)
        # The embeddings go; their tensor stays if it is the head's too. Only weights on a CPU are prepacked.
        self._model.set_input_embeddings(cut_layers.ZeroEmbedding())
        frozen_linear.prepack(self._model.to(device).eval())

    @torch.inference_mode()
    def __call__(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """The logits `[R, V]` of hidden states `[R, H]`, in the dtype and on the device of the head."""
        return self._read(hidden_RH)

    def _read_whole(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        self._layer.states = hidden_RH.unsqueeze(1)
        nothing = hidden_RH.new_zeros(len(hidden_RH), 1, self._embedding_width)
        try:
            result: Any = self._model(inputs_embeds=nothing, use_cache=False)
        finally:
            self._layer.states = None
        logits_RV: torch.Tensor = result.logits[:, -1]
        return logits_RV


class _PlainModel:
    """Adds nothing to the family's class."""


class _GivenStates(nn.Module):
    """Stands for all blocks: returns what it was given, in the form in which the family's layers return it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.states: torch.Tensor | None = None
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.states,) + (None,) * (self._outputs - 1) if self._outputs else self.states


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Memory that final norm and head take, known before anything is loaded."""
    return sum(_kept(_without_blocks(checkpoint))) * dtype.itemsize


def head_loading_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Memory of the CPU that loading them takes for a moment, at most.

    Embeddings are read too, and given up; then weights are rearranged, the head's in a copy. So the head is loaded
    before the blocks, while the memory for them is free.
    """
    model = _without_blocks(checkpoint)
    kept = _kept(model)
    read: int = sum(one.numel() for one in model.parameters())
    return max(read, sum(kept) + max(kept)) * dtype.itemsize


def _kept(model: Any) -> list[int]:
    """Sizes of the tensors that are not only embeddings."""
    head = model.get_output_embeddings()
    kept: dict[int, int] = {id(one): one.numel() for one in model.parameters()}
    for one in model.get_input_embeddings().parameters():
        del kept[id(one)]
    kept |= {id(one): one.numel() for one in (head.parameters() if head is not None else ())}
    return [*kept.values()]


def _without_blocks(checkpoint: Checkpoint) -> Any:
    """The model without its blocks and without memory."""
    config = copy.deepcopy(checkpoint.config)
    with torch.device("meta"):
        model: Any = families.causal_lm_class(config)(config)
    _, owner, name = cut_layers.find_layers(model, checkpoint.blocks)
    setattr(owner, name, nn.ModuleList())
    return model
