"""What a caller asks to be trained, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.client.tuning.lora import LoraSettings, lora_settings
from swarm.errors import InvalidOption
from swarm.models.adapters.adapter_config import MAX_PROMPT_LENGTH, Method

DEFAULT_VIRTUAL_TOKENS = 16
"""Virtual tokens of prompt tuning if the caller does not choose."""


@dataclass(frozen=True)
class TuningOptions:
    """Details of fine-tuning; see `from_pretrained(tuning=...)`.

    Attributes:
        pre_seq_len: number of virtual tokens; None for the adapter's own, or `DEFAULT_VIRTUAL_TOKENS` for new ones.
        lora_config: a `peft.LoraConfig`, or a dict of its entries. Entries that servers do not support are refused.
        lora_rank, lora_alpha, target_modules: the same without PEFT; 8, 8 and queries and values by default.
        adapter_revision: branch, tag or commit of the adapter's repository.
        trainable: whether an adapter that is loaded is trained further; None for only if a tuning mode is given.
        force_adapter: load an adapter that was trained for another revision of the model.
    """

    pre_seq_len: int | None = None
    lora_config: Any = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    target_modules: str | Iterable[str] | None = None
    adapter_revision: str | None = None
    trainable: bool | None = None
    force_adapter: bool = False


@dataclass(frozen=True)
class TuningConfig:
    """The resolved configuration of fine-tuning.

    Attributes:
        mode: what is trained besides a head; None for nothing.
        adapter: folder or repository to load; None to start with new parameters.
        lora: the settings of new LoRA factors; None if the mode is not LoRA.
        trainable: whether the parameters are trained, or used frozen.
        options: the caller's options.
    """

    mode: Method | None = None
    adapter: str | Path | None = None
    lora: LoraSettings | None = None
    trainable: bool = False
    options: TuningOptions = field(default_factory=TuningOptions)

    @property
    def is_training(self) -> bool:
        """Whether parameters other than a head are trained."""
        return self.trainable and (self.mode is not None or self.adapter is not None)


def resolve_tuning(tuning_mode: str | None, adapter: str | Path | None, options: TuningOptions) -> TuningConfig:
    """The configuration that these arguments of `from_pretrained` ask for.

    Raises:
        InvalidOption: an argument is not valid, or two of them exclude each other.
    """
    mode = _tuning_method(tuning_mode)
    _require_consistent(mode, adapter, options)
    lora = None
    if mode == "lora":
        lora = lora_settings(options.lora_config, options.lora_rank, options.lora_alpha, options.target_modules)
    trainable = options.trainable if options.trainable is not None else mode is not None or adapter is None
    return TuningConfig(mode, adapter, lora, trainable, options)


def _require_consistent(mode: Method | None, adapter: str | Path | None, options: TuningOptions) -> None:
    count = options.pre_seq_len
    if count is not None and mode not in ("ptune", "deep_ptune", None):
        raise InvalidOption(f"pre_seq_len is for virtual tokens, which tuning_mode={mode!r} does not have")
    if count is not None and (isinstance(count, bool) or not 1 <= count <= MAX_PROMPT_LENGTH):
        raise InvalidOption(
            f"pre_seq_len={count!r} is not a valid number of virtual tokens: use 1 to {MAX_PROMPT_LENGTH}"
        )
    for name in ("lora_config", "lora_rank", "lora_alpha", "target_modules"):
        if getattr(options, name) is None:
            continue
        if mode != "lora":
            raise InvalidOption(f"{name} is for LoRA; add tuning_mode='lora'")
        if adapter is not None:
            raise InvalidOption(f"{name} is for new LoRA factors; the adapter {adapter} has its own")
    if adapter is None:
        for name in ("adapter_revision", "trainable"):
            if getattr(options, name) is not None:
                raise InvalidOption(f"{name} is for an adapter that is loaded; add adapter=FOLDER_OR_REPOSITORY")
    if mode is None and adapter is None and count is not None:
        raise InvalidOption("pre_seq_len is for virtual tokens; add tuning_mode='ptune' or 'deep_ptune'")


def _tuning_method(tuning_mode: str | None) -> Method | None:
    match tuning_mode:
        case None | "ptune" | "deep_ptune" | "lora":
            return tuning_mode
        case _:
            raise InvalidOption(f"tuning_mode={tuning_mode!r} is not one of ptune, deep_ptune, lora, or None for none")
