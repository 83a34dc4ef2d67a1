"""What of each block becomes records, found on the meta device; and the block without these weights."""

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
from swarm.models.block_loading import fill_block
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.block_plan import BlockPlan, RecordKind, take_out
from swarm.models.flash.experts.expert_site import experts_per_token, find_experts
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward, is_sparse_activation
from swarm.models.flash.records import RecordLayout
from swarm.models.flash.streaming import plan_streamed

Structure = tuple[object, ...]


class BlockPlanner:
    """Plans blocks, one after the other. Blocks that are built alike get the same plan, which is found once.

    Args:
        exact: never select neurons; blocks of which a token needs few neurons are streamed instead.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._known: dict[Structure, BlockPlan | None] = {}

    def plan(self, block: nn.Module) -> BlockPlan | None:
        """The plan of a block, which may be on the meta device; None if nothing of it can go to flash."""
        structure = _structure(block)
        if structure not in self._known:
            self._known[structure] = plan_block(block, self._exact)
        return self._known[structure]


def plan_block(block: nn.Module, exact: bool = False) -> BlockPlan | None:
    """The plan that reads least for a token: experts, neurons (unless `exact`), or else the whole block.

    Args:
        block: in the dtypes in which it will compute; it may be on the meta device.
    """
    experts = find_experts(block)
    if experts is not None:
        return experts
    if not exact and any(is_sparse_activation(module) for module in block.modules()):
        sparse = find_sparse_feed_forward(_with_values(block))
        if sparse is not None:
            return sparse
    return plan_streamed(block)


def _with_values(block: nn.Module) -> nn.Module:
    """The block as it is, or with random weights if it is on the meta device: what it computes can then be tried."""
    if all(not tensor.is_meta for tensor in block.parameters()):
        return block
    made = copy.deepcopy(block).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if tensor.ndim >= 2 and tensor.is_floating_point():
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
            else:  # norms multiply by one and add nothing; a threshold is zero
                tensor.fill_(tensor.ndim == 1 and not name.endswith("bias"))
    return made.eval()


def _structure(block: nn.Module) -> Structure:
    """What plans depend on: the kinds of the modules, and the shapes and dtypes of their tensors."""
    modules = [(path, type(module), repr(module)) for path, module in block.named_modules()]
    tensors = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in block.named_parameters()]
    return (*modules, *tensors)


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


@dataclass
class BuiltBlock:
    """A model cut to one block, without the modules that the plan takes out.

    Attributes:
        model: the family's base model on the CPU, with the config of the whole model; its list of layers holds this
            block, with a `TakenOut` in each place of the plan.
        taken: the modules that stood there, by their roles, on the meta device: shapes and settings, no weights.
    """

    model: Any
    taken: dict[str, nn.Module]


def build_block(
    checkpoint: Checkpoint, block: int, dtype: torch.dtype, plan: BlockPlan, tensors: Mapping[str, torch.Tensor]
) -> BuiltBlock:
    """Build a block from the tensors that stay in memory.

    No weight of a module that is taken out is ever allocated. Tensors that already have `dtype` are used as they are,
    not copied.

    Args:
        tensors: the block's tensors outside of records, by their names inside the loaded block (after transformers'
            conversions). Those in `plan.resident` belong to the modules that are taken out and are passed over: what
            takes their place gets them from the caller.

    Raises:
        CheckpointError: tensors are missing or do not fit the model.
    """
    taken: dict[str, nn.Module] = {}
    kept = {name: tensor for name, tensor in tensors.items() if name not in plan.resident}
    model = fill_block(
        checkpoint, block, dtype, kept, change=lambda layer: taken.update(take_out(layer, plan)), converted=True
    )
    return BuiltBlock(model, taken)
