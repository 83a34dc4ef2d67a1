"""Where a block's feed-forward layer is, if a token needs few of its neurons.

Found by trying: an activation that yields exact zeros, the linear layers beside it, and the proof, on random inputs,
that they compute what the block computes. The family's name plays no part, so a Llama with ReLU is found and a Llama
with SiLU is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from swarm.models.flash.block_plan import BlockPlan, RecordKind

UP, GATE, ACTIVATION, DOWN = "up", "gate", "activation", "down"
"""The roles of a plan's modules: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate."""

MIN_ZERO_SHARE = 0.25
"""Share of standard normal inputs that an activation must make exactly zero. ReLU makes half of them zero; SiLU, GELU
and their like none."""

PROBE_TOKENS = 16
PROBE_SCALES = (1.0, 10.0, 100.0)
"""Inputs are enlarged until some neuron is active, for activations with a threshold far from zero."""

TOLERANCE = 2e-2
"""Relative difference that the proof allows: bfloat16 rounds to 2^-8. A wrong formula is off by about 1."""

_NOT_CALLABLE_SO = (TypeError, ValueError, RuntimeError, AttributeError)
"""What modules raise that do not take one tensor of hidden states."""


def find_sparse_feed_forward(block: nn.Module) -> BlockPlan | None:
    """The plan for a block whose feed-forward layer has an activation that yields exact zeros; None for other blocks.

    Args:
        block: loaded, on the CPU, in evaluation mode.
    """
    plans = [
        plan
        for path, module in block.named_modules()
        if is_sparse_activation(module) and (plan := _plan_around(block, path)) is not None
    ]
    return plans[0] if len(plans) == 1 else None


def entry_role(plan: BlockPlan) -> str:
    """The role of the module that receives the feed-forward layer's input and decides which neurons are active."""
    return GATE if GATE in plan.modules else UP


def put_in_place(block: nn.Module, plan: BlockPlan, feed_forward: nn.Module) -> None:
    """Have `feed_forward`, from hidden states to hidden states, compute what the plan's modules did.

    Not every family has one module that could be replaced: OPT's linear layers lie in the layer itself. So the module
    that receives the input computes everything, and the others pass it on.
    """
    entry = entry_role(plan)
    for role, path in plan.modules.items():
        if role == entry:
            block.set_submodule(path, feed_forward)
        else:
            block.set_submodule(path, One() if role == UP else nn.Identity())


class One(nn.Module):
    """Stands for the up projection beside a gate that has computed everything: the product with it changes nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_ones(())


@torch.no_grad()
def is_sparse_activation(module: nn.Module) -> bool:
    """Whether a module works on each value alone and makes enough of them zero."""
    if any(True for _ in module.children()) or any(parameter.ndim for parameter in module.parameters()):
        return False
    values = torch.randn(PROBE_TOKENS, 64, generator=torch.Generator().manual_seed(0))
    order = torch.arange(values.numel()).flip(0)
    try:
        outputs = module(values)
        shuffled = module(values.flatten()[order])
    except _NOT_CALLABLE_SO:
        return False
    if not isinstance(outputs, torch.Tensor) or outputs.shape != values.shape:
        return False
    zeros = (outputs == 0).float().mean().item()
    return zeros >= MIN_ZERO_SHARE and torch.equal(outputs.flatten()[order], shuffled)


def _plan_around(block: nn.Module, activation_path: str) -> BlockPlan | None:
    """The plan for the activation at this path and the linear layers beside it, if they prove to be a feed-forward."""
    owner_path, _, activation_name = activation_path.rpartition(".")
    owner = block.get_submodule(owner_path)
    linears = {name: child for name, child in owner.named_children() if isinstance(child, nn.Linear)}
    if len(linears) not in (2, 3):
        return None
    for roles in _assignments(linears):
        names = {**roles, ACTIVATION: activation_name}
        if _proved(owner, names):
            prefix = f"{owner_path}." if owner_path else ""
            return _plan({role: prefix + name for role, name in names.items()}, block)
    return None


def _assignments(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, str]]:
    """Roles for linear layers whose widths agree."""
    roles = (UP, DOWN) if len(linears) == 2 else (UP, GATE, DOWN)
    for names in itertools.permutations(linears):
        assignment = dict(zip(roles, names, strict=True))
        up, down = linears[assignment[UP]], linears[assignment[DOWN]]
        gate = linears[assignment.get(GATE, assignment[UP])]
        hidden, neurons = up.in_features, up.out_features
        if (gate.in_features, gate.out_features) == (hidden, neurons) == (down.out_features, down.in_features):
            yield assignment


def _plan(paths: Mapping[str, str], block: nn.Module) -> BlockPlan:
    axes = {f"{paths[role]}.weight": int(role == DOWN) for role in (UP, GATE, DOWN) if role in paths}
    tensors = (
        f"{path}.{name}" for path in paths.values() for name in block.get_submodule(path).state_dict(keep_vars=True)
    )
    return BlockPlan(RecordKind.NEURONS, dict(paths), axes, tuple(name for name in tensors if name not in axes))


@torch.no_grad()
def _proved(owner: nn.Module, names: Mapping[str, str]) -> bool:
    """Whether one module that computes the formula can stand for the children in these roles."""
    modules = {role: owner.get_submodule(name) for role, name in names.items()}
    formula = _Formula(modules)
    weight = modules[UP].weight
    assert isinstance(weight, torch.Tensor)
    noise = torch.randn(1, PROBE_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    for scale in PROBE_SCALES:
        hidden = (noise * scale).to(weight.dtype)
        expected = _down_output(owner, names[DOWN], hidden)
        try:
            put_in_place(owner, BlockPlan(RecordKind.NEURONS, names, {}), formula)
            actual = _down_output(owner, names[DOWN], hidden)
        finally:
            for role, module in modules.items():
                owner.set_submodule(names[role], module)
        if expected is None or actual is None or not _agree(actual, expected):
            return False
        if formula.active:
            return True
    return False  # no input makes any neuron active, so nothing was proved


class _Formula(nn.Module):
    """The feed-forward layer, as the roles of its modules say that it is computed."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.roles = nn.ModuleDict(modules)
        self.active = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        neurons: torch.Tensor = self.roles[UP](hidden)
        if GATE in self.roles:
            neurons = self.roles[ACTIVATION](self.roles[GATE](hidden)) * neurons
        else:
            neurons = self.roles[ACTIVATION](neurons)
        self.active = bool(neurons.any())
        result: torch.Tensor = self.roles[DOWN](neurons)
        return result


def _down_output(owner: nn.Module, down: str, hidden: torch.Tensor) -> torch.Tensor | None:
    """What the child `down` returns while the owner runs; None if the owner needs more than hidden states."""
    outputs: list[torch.Tensor] = []
    with owner.get_submodule(down).register_forward_hook(lambda module, args, output: outputs.append(output)):
        try:
            owner(hidden)
        except _NOT_CALLABLE_SO:
            return None
    return outputs[0] if len(outputs) == 1 else None


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    return bool((actual.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm())
