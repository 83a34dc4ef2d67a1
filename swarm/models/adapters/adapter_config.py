"""Parsing and validating `adapter_config.json`: the method, the base model, and no unsupported options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from swarm.errors import AdapterError

MAX_LORA_RANK = 1024
"""Rank of LoRA factors; a server may accept less."""

MAX_PROMPT_LENGTH = 4096
"""Positions that a block's soft prompt may have."""

Method = Literal["lora", "ptune", "deep_ptune", "head"]

PEFT_TYPES: dict[Method, str] = {
    "lora": "LORA",
    "ptune": "PROMPT_TUNING",
    "deep_ptune": "SWARM_DEEP_PROMPT_TUNING",
    "head": "SWARM_HEAD",
}
"""Our name of each method to PEFT's. PEFT does not have the last two methods, so it rejects these names."""

SUPPORTED_LORA_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
"""LoRA initializations that leave the model's own weights unchanged. The others change them."""

SUPPORTED_ENTRIES = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out"),
        *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "modules_to_save"),
        *("init_lora_weights", "bias", "runtime_config", "ensure_weight_tying", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "velora_config", "megatron_config", "megatron_core", "qalora_group_size"),
        # of prompt tuning
        *("num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers"),
        *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
    )
)
"""Entries that are read, or that do not change what the adapter computes. All other entries must be empty."""


@dataclass(frozen=True)
class AdapterConfig:
    """The validated contents of an adapter's config file.

    Attributes:
        method: how the adapter was trained.
        peft_type: PEFT's name of the method.
        task_type: "CAUSAL_LM", "SEQ_CLS", or "" if not given.
        base: name of the model that the adapter was trained for; None if not given.
        revision: revision of that model; None if not given.
        rank, alpha, use_rslora, rank_pattern, alpha_pattern: LoRA options, as in PEFT's `LoraConfig`.
        dropout: LoRA dropout, which matters only in training.
        positions: number of virtual tokens; 0 for LoRA.
    """

    method: Method
    peft_type: str
    task_type: str = ""
    base: str | None = None
    revision: str | None = None
    rank: int = 8
    alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    positions: int = 0

    @property
    def is_deep(self) -> bool:
        return self.method == "deep_ptune"

    def rank_and_alpha(self, place: str) -> tuple[int, float]:
        """LoRA's r and alpha for the module with this path in the model."""
        return (
            next((rank for name, rank in self.rank_pattern.items() if matches_module(name, place)), self.rank),
            next((alpha for name, alpha in self.alpha_pattern.items() if matches_module(name, place)), self.alpha),
        )


def matches_module(name: str, place: str) -> bool:
    """Whether a pattern's entry matches a module's path: by its end, or by the whole path if it starts with "^"."""
    return place == name.removeprefix("^") or (not name.startswith("^") and place.endswith(f".{name}"))


def parse_adapter_config(config: Any, source: str) -> AdapterConfig:
    """Validate the parsed JSON of a config file. Raises `AdapterError` that names the unsupported entry."""
    return _ConfigParser(config, source).read()


class _ConfigParser:
    def __init__(self, config: Any, source: str) -> None:
        self._source = source
        if not isinstance(config, dict):
            self._refuse("its config is not a JSON object")
        self._config: dict[str, Any] = config

    def read(self) -> AdapterConfig:
        peft_type = self._get("peft_type", str, "")
        method = next((ours for ours, theirs in PEFT_TYPES.items() if theirs == peft_type), None)
        if method is None:
            self._refuse(f"its method is {peft_type[:50]!r}; supported methods are {', '.join(PEFT_TYPES.values())}")
        self._refuse_unsupported()
        return AdapterConfig(
            method=method,
            peft_type=peft_type,
            task_type=self._get("task_type", str, ""),
            base=self._get("base_model_name_or_path", str, None),
            revision=self._get("revision", str, None),
            rank=self._number("r", 8, 1, MAX_LORA_RANK),
            alpha=self._number("lora_alpha", 8, 0, 1e6),
            use_rslora=self._get("use_rslora", bool, False),
            rank_pattern=self._pattern("rank_pattern", MAX_LORA_RANK),
            alpha_pattern=self._pattern("alpha_pattern", 1e6),
            dropout=self._number("lora_dropout", 0.0, 0, 1),
            positions=self._number("num_virtual_tokens", 0, 1, MAX_PROMPT_LENGTH) if "ptune" in method else 0,
        )

    def _refuse_unsupported(self) -> None:
        for name, value in self._config.items():
            if name not in SUPPORTED_ENTRIES and value:
                self._refuse(f"it uses {name[:50]}, which is not supported; train it without")
        if self._config.get("bias") not in (None, "none"):
            self._refuse("it trains biases (bias), but the weights of servers cannot be changed")
        initial = self._config.get("init_lora_weights")
        if not isinstance(initial, str | bool | None) or initial not in SUPPORTED_LORA_INITIALIZATIONS:
            self._refuse(f"init_lora_weights={str(initial)[:50]!r} changes the model's own weights")

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            self._refuse(f"{name} is {str(value)[:50]!r}, which has the wrong type")
        return value

    def _number(self, name: str, default: float, least: float, most: float) -> Any:
        return self._checked(name, self._config.get(name, default), least, most, whole=isinstance(default, int))

    def _pattern(self, name: str, most: float) -> dict[str, Any]:
        pattern = self._get(name, dict, {})
        if len(pattern) > 100_000 or any(set(place) & set("*+?[](){}|\\$") for place in pattern):
            self._refuse(f"{name} has regular expressions; only names of modules are supported")
        least, whole = (1, True) if name == "rank_pattern" else (0, False)
        return {place: self._checked(name, value, least, most, whole) for place, value in pattern.items()}

    def _checked(self, name: str, value: Any, least: float, most: float, whole: bool) -> Any:
        kinds = (int,) if whole and name != "lora_alpha" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            self._refuse(f"{name} is {str(value)[:50]}; it must be a number from {least} to {most}")
        return value

    def _refuse(self, why: str) -> NoReturn:
        raise AdapterError(f"the adapter {self._source} cannot be used: {why}")
