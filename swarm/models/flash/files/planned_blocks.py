"""What preparation will write for each block of a span, found on the meta device before any weights are read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.core_model_loading import build_glob_alternation

from swarm.data_structures import Span
from swarm.errors import CheckpointError
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.experts.expert_site import experts_per_token
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.records.record_layout import RecordLayout

PlanOf = Callable[[nn.Module], BlockPlan | None]
"""Finds what of a block goes to flash; None: nothing. The block is on the meta device, in the dtypes in which it will
compute."""


@dataclass(frozen=True)
class PlannedBlock:
    """What preparation will write for one block.

    Attributes:
        plan: what of the block becomes records.
        layout: of the records.
        tensors: all tensors of the block, on the meta device.
        resident_bytes: bytes of the tensors that stay outside of records.
        experts_per_token: how many records a token needs; 0 if the block does not say or has no experts.
    """

    plan: BlockPlan
    layout: RecordLayout
    tensors: Mapping[str, torch.Tensor]
    resident_bytes: int
    experts_per_token: int = 0

    @property
    def size(self) -> int:
        """Bytes of the files, but for a few for headers and the manifest."""
        return self.layout.file_bytes + self.resident_bytes


def plan_span(checkpoint: Checkpoint, span: Span, dtype: torch.dtype, plan_of: PlanOf) -> dict[int, PlannedBlock]:
    """What will be written for each block of `span`; blocks of which nothing goes to flash are left out.

    Raises `InvalidSpan` if the span is outside the model.
    """
    checkpoint.validate_span(span.start, span.end)
    layers = _meta_layers(checkpoint, dtype)
    planned = {}
    for block in range(span.start, span.end):
        plan = plan_of(layers[block])
        if plan is not None:
            planned[block] = _planned(layers[block], plan, dtype)
    return planned


def block_tensors(block: nn.Module, plan: BlockPlan) -> dict[str, torch.Tensor]:
    """All tensors of a block by their names inside it: those of its checkpoint, and any other that the plan names."""
    tensors: dict[str, torch.Tensor] = dict(block.state_dict())
    others = dict(block.named_buffers())
    return tensors | {name: others[name] for name in plan.resident if name not in tensors}


def check_tensors(tensors: Mapping[str, torch.Tensor], planned: PlannedBlock) -> None:
    """Raise `CheckpointError` unless a loaded block has the tensors that were planned for.

    They differ if the checkpoint is quantized in a form in which the block also computes.
    """
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in planned.tensors.items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if found != expected:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise CheckpointError(
            f"the weights of this checkpoint are in a special form ({name}) and cannot be kept on flash; "
            "use a checkpoint that is not quantized"
        )


def _planned(block: nn.Module, plan: BlockPlan, dtype: torch.dtype) -> PlannedBlock:
    tensors = block_tensors(block, plan)
    for name in plan.axes:
        if tensors[name].dtype != dtype:
            raise ValueError(f"the plan makes records of {name}, which is {tensors[name].dtype} and not {dtype}")
    layout = plan.layout({name: tuple(tensors[name].shape) for name in plan.axes}, dtype)
    resident = sum(tensor.nbytes for name, tensor in tensors.items() if name not in plan.axes)
    experts = experts_per_token(block, plan) if plan.kind is RecordKind.EXPERTS else 0
    return PlannedBlock(plan, layout, tensors, resident, experts)


def _meta_layers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model's blocks on the meta device, each tensor in the dtype in which it would be loaded."""
    config = copy.deepcopy(checkpoint.config)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype)
    # Loading leaves some tensors in fp32, such as those of a router. A model without weights is not treated so.
    kept = model._get_dtype_plan(dtype)
    if kept:
        pattern, names, _ = build_glob_alternation(list(kept))
        tensors = model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            match = pattern.search(name)
            if match is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(kept[names[match.lastgroup]])
    return model.get_submodule(checkpoint.structure.layers_path)
