"""Where a block's experts are: finds the module that holds the weights of all experts.

transformers 5 keeps the experts of a mixture in one module, whose parameters have three dimensions, the first of which
counts experts. Families differ in how that module is called:

- ROUTED: with each token's experts and their weights. Their classes are decorated with `use_experts_implementation`,
  so that the functions of `transformers.integrations.moe` can take the place of their `forward`.
- EVERY_EXPERT: with the inputs of every expert one after the other, zeros where a token is not routed (llama4).

Experts that are called in any other way are not found; their blocks are streamed instead.
"""

from __future__ import annotations

import enum
import inspect

import torch
from torch import nn

from swarm.models.flash.block_plan import BlockPlan, RecordKind

EXPERTS = "experts"
"""The role of the module that holds the experts."""

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of an experts module's weights; a bias is named after its weight, with `_bias` appended."""

ROUTED_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
"""What `use_experts_implementation` adds to a class, and what `expert_forward` computes by. From transformers 5.20 on
there is `has_post_expert_norm` too."""


class ExpertCall(enum.Enum):
    """How a block calls its experts."""

    ROUTED = "routed"
    EVERY_EXPERT = "every expert"


def find_experts(block: nn.Module) -> BlockPlan | None:
    """The plan by which each expert of `block` becomes one record; None if it has no experts that can be computed so.

    Needs no weights: the block may be on the meta device.
    """
    found = {path: module for path, module in block.named_modules() if expert_call(module) is not None}
    if len(found) != 1:
        return None
    ((path, module),) = found.items()
    record_parts = expert_tensors(module)
    others = [name for name, _ in module.named_parameters() if name not in record_parts]
    buffers = [name for name, _ in module.named_buffers()]
    return BlockPlan(
        kind=RecordKind.EXPERTS,
        modules={EXPERTS: path},
        axes={f"{path}.{name}": 0 for name in record_parts},
        resident=tuple(f"{path}.{name}" for name in others + buffers),
    )


def expert_tensors(module: nn.Module) -> list[str]:
    """Names of the parameters of an experts module that hold a part for each expert: weights and biases."""
    names = [name for weight in WEIGHTS for name in (weight, f"{weight}_bias")]
    own = dict(module.named_parameters(recurse=False))
    return [name for name in names if name in own]


def experts_per_token(block: nn.Module, plan: BlockPlan) -> int:
    """How many experts a token is sent to, as the router beside the experts says; 0 if it does not.

    Routers of transformers have it as `top_k`.
    """
    around = block.get_submodule(plan.modules[EXPERTS].rpartition(".")[0])
    return max((k for module in around.modules() if isinstance(k := getattr(module, "top_k", None), int)), default=0)


def expert_call(module: nn.Module) -> ExpertCall | None:
    """How `module` is called, if it holds experts; else None."""
    weights = [module._parameters.get(name) for name in WEIGHTS]
    present = [weight for weight in weights if weight is not None]
    if weights[-1] is None or len(present) != 2 or any(weight.dim() != 3 for weight in present):
        return None
    if len({len(module.get_parameter(name)) for name in expert_tensors(module)}) != 1:
        return None
    if all(hasattr(module, name) for name in ROUTED_ATTRIBUTES):
        return ExpertCall.ROUTED
    return ExpertCall.EVERY_EXPERT if _computes_rows_of_one_expert(module) else None


def _computes_rows_of_one_expert(module: nn.Module) -> bool:
    """Whether the module's own forward, given the weights of one expert and some rows, returns as many rows."""
    arguments = [one for one in inspect.signature(module.forward).parameters.values() if one.default is one.empty]
    names = expert_tensors(module)
    if len(arguments) != 1 or any(name.endswith("_bias") for name in names):  # a bias makes something of zeros
        return False
    one = {name: module.get_parameter(name)[:1].to("meta") for name in names}
    width = one["down_proj"].shape[-1]
    rows_RH = torch.empty(3, width, device="meta", dtype=one["down_proj"].dtype)
    try:
        result = torch.func.functional_call(module, one, (rows_RH,))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # a family's own code
        return False
    return isinstance(result, torch.Tensor) and result.shape == rows_RH.shape
