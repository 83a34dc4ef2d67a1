"""Block plans for tests of files and loading: they take out whatever is largest."""

from __future__ import annotations

from torch import nn

from swarm.models.flash.block_plan import BlockPlan, RecordKind


def plan_largest(block: nn.Module) -> BlockPlan:
    """The plan that takes out a block's fused experts, or its largest linear layer if there are none."""
    experts = next((path for path, module in block.named_modules() if _is_experts(module)), None)
    if experts is not None:
        return _plan(block, RecordKind.EXPERTS, "experts", experts)
    weights = [(module.weight.numel(), path) for path, module in block.named_modules() if _is_matrix(module)]
    return _plan(block, RecordKind.NEURONS, "up", max(weights)[1])


def _plan(block: nn.Module, kind: RecordKind, role: str, path: str) -> BlockPlan:
    tensors = block.get_submodule(path).state_dict()
    records = {f"{path}.{name}": 0 for name, tensor in tensors.items() if tensor.dim() > 1}
    others = tuple(f"{path}.{name}" for name, tensor in tensors.items() if tensor.dim() == 1)
    return BlockPlan(kind, {role: path}, records, others)


def _is_experts(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _is_matrix(module: nn.Module) -> bool:
    """A linear layer; some families have their own class for it (GPT-2's `Conv1D`)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
