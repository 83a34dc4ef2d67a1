"""LoRA (Hu et al. 2021): its settings, the modules they select, and the factors as torch parameters.

Settings are PEFT's `LoraConfig`, a dict of its entries, or keyword arguments. What the swarm does not support is
refused by name, before anything is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from swarm.errors import InvalidOption
from swarm.models.adapters.adapter_config import MAX_LORA_RANK
from swarm.models.adapters.adapter_files import StoredAdapter, lora_scaling, scale_up
from swarm.models.adapters.block_adapter import LoraFactors
from swarm.models.cutting.model_inspection import LoraTargets

ALL_LINEAR = "all-linear"
"""PEFT's value of `target_modules` for all linear modules."""

QUERIES_AND_VALUES = (
    *(("q_proj", "v_proj"), ("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj"), ("Wq", "Wv")),
    *(("q_gate_proj", "kv_b_proj"), ("query_key_value",), ("c_attn",), ("Wqkv",), ("qkv_proj",)),
)
"""Names of the modules that compute queries and values in the families; some compute both, and keys, at once."""

EXTRA_TARGETS = {"phi": ("fc1", "fc2")}
"""Modules that PEFT trains by default in some families besides queries and values."""

EXPERT_MODULES = frozenset(("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"))
"""Names that PEFT treats as experts in models that have experts, even in dense layers."""

InitialWeights = bool | Literal["gaussian"]
"""PEFT's `init_lora_weights`."""

SUPPORTED_ENTRIES = frozenset(
    (
        *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "use_rslora", "rank_pattern"),
        *("alpha_pattern", "init_lora_weights", "modules_to_save"),
    )
)
"""Entries of `LoraConfig` that are supported."""

IGNORED_ENTRIES = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "fan_in_fan_out", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
    )
)
"""Entries that do not change what is computed."""

UNSUPPORTED_REASONS = {
    "lora_dropout": "servers apply no dropout",
    "use_dora": "DoRA rescales the model's own weights, which are on servers",
    "bias": "the weights and biases on servers are frozen",
    "lora_bias": "servers accept factors without biases only",
    "target_parameters": "servers add LoRA to linear modules only",
}
"""Why the swarm does not support an entry."""


@dataclass(frozen=True)
class LoraSettings:
    """The settings of LoRA, named as in PEFT's `LoraConfig`; `rank` and `alpha` are its `r` and `lora_alpha`."""

    rank: int = 8
    alpha: float = 8
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: frozenset[int] | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    initial: InitialWeights = True

    def rank_and_alpha(self, place: str) -> tuple[int, float]:
        """Rank and alpha of the module at `place` in the model."""
        return _match_pattern(self.rank_pattern, place, self.rank), _match_pattern(
            self.alpha_pattern, place, self.alpha
        )


def lora_settings(
    config: Any = None,
    rank: int | None = None,
    alpha: float | None = None,
    target_modules: str | Iterable[str] | None = None,
) -> LoraSettings:
    """The settings that a caller asks for.

    Args:
        config: a `peft.LoraConfig`, a mapping of its entries, or None.
        rank, alpha, target_modules: override the entries of `config`.

    Raises:
        InvalidOption: a setting is not valid, or the swarm does not support it.
    """
    settings = _from_mapping(_entries(config))
    settings = replace(
        settings,
        rank=settings.rank if rank is None else rank,
        alpha=settings.alpha if alpha is None else alpha,
        target_modules=settings.target_modules if target_modules is None else _names("target_modules", target_modules),
    )
    for name, value in {"lora_rank": settings.rank, **settings.rank_pattern}.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LORA_RANK:
            raise InvalidOption(f"{name}={value!r} is not a valid rank: use 1 to {MAX_LORA_RANK}")
    for name, factor in {"lora_alpha": settings.alpha, **settings.alpha_pattern}.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise InvalidOption(f"{name}={factor!r} is not a positive number")
    return settings


def _entries(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(entries, Mapping):
        raise InvalidOption(f"lora_config={config!r} is neither a peft.LoraConfig nor a dict of its entries")
    kind = getattr(entries.get("peft_type"), "value", entries.get("peft_type"))
    if kind not in (None, "LORA"):
        raise InvalidOption(f"lora_config is a configuration of {kind}; use a peft.LoraConfig")
    return entries


def _from_mapping(entries: Mapping[str, Any]) -> LoraSettings:
    for name, value in entries.items():
        if name not in SUPPORTED_ENTRIES | IGNORED_ENTRIES and value and (name, value) != ("bias", "none"):
            reason = UNSUPPORTED_REASONS.get(name, "it is not implemented")
            raise InvalidOption(f"the swarm does not support {name}={value!r}: {reason}")
    initial = entries.get("init_lora_weights", True)
    if initial not in (True, False, "gaussian"):
        raise InvalidOption(f"init_lora_weights={initial!r} needs the model's weights; use True, False or 'gaussian'")
    others = sorted(set(entries.get("modules_to_save") or ()) - {"score", "classifier"})
    if others:
        raise InvalidOption(
            f"modules_to_save={others} is not supported: only the head of a classification can be trained"
        )
    layers = entries.get("layers_to_transform")
    return LoraSettings(
        rank=entries.get("r", 8),
        alpha=entries.get("lora_alpha", 8),
        target_modules=_names("target_modules", entries.get("target_modules")),
        exclude_modules=_names("exclude_modules", entries.get("exclude_modules")),
        layers_to_transform=None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
        use_rslora=bool(entries.get("use_rslora", False)),
        rank_pattern=dict(entries.get("rank_pattern") or {}),
        alpha_pattern=dict(entries.get("alpha_pattern") or {}),
        initial=initial,
    )


def _names(option: str, value: Any) -> tuple[str, ...] | str | None:
    if value is None or isinstance(value, str):
        return value
    names = tuple(sorted(value)) if isinstance(value, set | frozenset) else tuple(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidOption(f'{option}={value!r} is not a list of names such as ["q_proj", "v_proj"]')
    return names


def _match_pattern(pattern: Mapping[str, Any], place: str, default: Any) -> Any:
    """PEFT's rule: the first entry whose regular expression matches the whole path or the end of it."""
    return next((value for name, value in pattern.items() if re.match(rf"(.*\.)?({name})$", place)), default)


def select_targets(
    settings: LoraSettings, modules: LoraTargets, path: str, family: str
) -> dict[int, dict[str, tuple[int, int]]]:
    """The modules that get LoRA: for each block, the sorted paths inside it with their (inputs, outputs).

    Args:
        settings: which modules are asked for.
        modules: the linear modules of the model.
        path: path of the list of blocks in the whole model, such as "model.layers".
        family: the config's model type.

    Raises:
        InvalidOption: no module has a name that is asked for, or a module outside the blocks has it.
    """
    names = settings.target_modules or default_targets(modules, family)
    layers = settings.layers_to_transform
    if layers is not None and not layers <= set(range(len(modules.blocks))):
        raise InvalidOption(f"layers_to_transform={sorted(layers)}: the model has blocks 0:{len(modules.blocks)}")
    found = {
        block: {
            module: sizes
            for module, sizes in sorted(inside.items())
            if _matches(names, place := f"{path}.{block}.{module}")
            and not (settings.exclude_modules and _matches(settings.exclude_modules, place))
        }
        for block, inside in enumerate(modules.blocks)
        if layers is None or block in layers
    }
    _require_matches(names, found, modules, path)
    leaves = {module.rpartition(".")[2] for inside in found.values() for module in inside}
    if modules.has_stacked_experts and (experts := sorted(leaves & EXPERT_MODULES)):
        raise InvalidOption(
            f"target_modules: {', '.join(experts)} also match the experts, which are not linear modules here; name "
            "modules of the attention instead"
        )
    return {block: inside for block, inside in found.items() if inside}


def _require_matches(targets: tuple[str, ...] | str, found: Mapping[int, Any], modules: LoraTargets, path: str) -> None:
    if targets != ALL_LINEAR:
        root = path.removesuffix(modules.layers_path)
        for outside in (*(root + name for name in modules.outside_blocks), "lm_head", "score", "classifier"):
            if _matches(targets, outside):
                raise InvalidOption(f"target_modules: {outside} is outside the blocks, where LoRA cannot be added")
    names = [targets] if isinstance(targets, str) else targets
    places = [f"{path}.{block}.{module}" for block, inside in found.items() for module in inside]
    for name in names:
        if not any(_matches(name if isinstance(targets, str) else (name,), place) for place in places):
            known = sorted({module for block in modules.blocks for module in block})
            raise InvalidOption(f"target_modules: no linear module is named {name!r}; the blocks have {known}")


def _matches(targets: tuple[str, ...] | str, place: str) -> bool:
    """PEFT's rule: a string is a regular expression of the whole path, a list has the ends of paths."""
    if targets == ALL_LINEAR:
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, place) is not None
    return any(place == name or place.endswith(f".{name}") for name in targets)


def default_targets(modules: LoraTargets, family: str) -> tuple[str, ...]:
    """PEFT's defaults: the modules of queries and values. Raises `InvalidOption` if the blocks have none of them."""
    names = {module.rpartition(".")[2] for block in modules.blocks for module in block}
    for usual in QUERIES_AND_VALUES:
        if names.issuperset(usual):
            return (*usual, *EXTRA_TARGETS.get(family, ()))
    raise InvalidOption(f"pass target_modules=[...]: {family!r} has no default, only the modules {sorted(names)}")


class LoraModule(nn.Module):
    """The LoRA of one linear module, which adds `scaling * lora_B @ lora_A`; float32.

    Args:
        down: A, `[rank, inputs]`.
        up: B, `[outputs, rank]`.
    """

    def __init__(self, down: torch.Tensor, up: torch.Tensor, alpha: float, use_rslora: bool) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(down.float())
        self.lora_B = nn.Parameter(up.float())
        self.alpha = alpha
        self.scaling = lora_scaling(self.rank, alpha, use_rslora)

    @property
    def rank(self) -> int:
        return len(self.lora_A)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}"


class Lora(nn.Module):
    """The LoRA of a whole model: `lora[3]["self_attn.q_proj"]` is a `LoraModule`.

    Args:
        modules: by block and module path inside it.
        use_rslora: whether `scaling` is that of rank-stabilized LoRA.
    """

    def __init__(self, modules: Mapping[int, Mapping[str, LoraModule]], use_rslora: bool) -> None:
        super().__init__()
        self.use_rslora = use_rslora
        self._by_block = {block: dict(sorted(modules[block].items())) for block in sorted(modules)}
        for block, inside in self._by_block.items():
            for module, factors in inside.items():
                self._register(f"{block}.{module}", factors)

    def __getitem__(self, block: int) -> Mapping[str, LoraModule]:
        return self._by_block.get(block, {})

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_block)

    def factors(self, block: int) -> tuple[LoraFactors, ...]:
        """The factors of a block as servers get them, scaled inside the graph."""
        return tuple(
            LoraFactors(module, one.lora_A, scale_up(one.lora_B, one.scaling)) for module, one in self[block].items()
        )

    def _register(self, path: str, factors: LoraModule) -> None:
        """Register a module under its path, so that its parameters have names like `lora.3.self_attn.q_proj.lora_A`."""
        owner: nn.Module = self
        *outer, last = path.split(".")
        for name in outer:
            if name not in owner._modules:
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, factors)


def new_lora(targets: Mapping[int, Mapping[str, tuple[int, int]]], settings: LoraSettings, path: str) -> Lora:
    """Untrained factors: A random and B zero, so that at first they change nothing.

    Args:
        targets: see `select_targets`.
        path: path of the list of blocks in the model.
    """

    def new_module(block: int, module: str, sizes: tuple[int, int]) -> LoraModule:
        rank, alpha = settings.rank_and_alpha(f"{path}.{block}.{module}")
        down, up = torch.empty(rank, sizes[0]), torch.zeros(sizes[1], rank)
        if settings.initial == "gaussian":
            nn.init.normal_(down, std=1 / rank)
        else:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        if settings.initial is False:
            nn.init.kaiming_uniform_(up, a=math.sqrt(5))
        return LoraModule(down, up, alpha, settings.use_rslora)

    modules = {
        block: {name: new_module(block, name, sizes) for name, sizes in inside.items()}
        for block, inside in targets.items()
    }
    return Lora(modules, settings.use_rslora)


def stored_lora(stored: StoredAdapter) -> Lora:
    """The factors of an adapter's files."""
    use_rslora = stored.config.use_rslora
    modules = {
        block: {name: LoraModule(one.down, one.up, one.alpha, use_rslora) for name, one in inside.items()}
        for block, inside in stored.lora.items()
    }
    return Lora(modules, use_rslora)
