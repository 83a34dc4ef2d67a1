"""What a person asks to be trained, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.client.tuning.lora_config import LoraSettings, lora_settings
from swarm.errors import InvalidOption
from swarm.models.adapters.adapter_config import Method
from swarm.protocol.messages import MAX_PROMPT_LENGTH

DEFAULT_VIRTUAL_TOKENS = 16


@dataclass(frozen=True)
class TuningOptions:
    """Attributes:
    mode: what is trained beside a head; None for nothing.
    pre_seq_len: virtual tokens; None for the adapter's own number, else `DEFAULT_VIRTUAL_TOKENS`.
    lora: LoRA to begin with.
    adapter: folder or repository to load; None to begin anew.
    adapter_revision: of that repository.
    force: take an adapter of another revision of the model.
    trainable: whether training of the adapter goes on.
    """

    mode: Method | None = None
    pre_seq_len: int | None = None
    lora: LoraSettings | None = None
    adapter: str | Path | None = None
    adapter_revision: str | None = None
    force: bool = False
    trainable: bool = False


def tuning_options(
    tuning_mode: str | None,
    pre_seq_len: int | None,
    lora_config: Any,
    lora_rank: int | None,
    lora_alpha: float | None,
    target_modules: str | Iterable[str] | None,
    adapter: str | Path | None,
    adapter_revision: str | None,
    force_adapter: bool,
    trainable: bool | None,
) -> TuningOptions:
    """The arguments of `from_pretrained`. Raises `InvalidOption` if they make no sense together."""
    mode = _mode(tuning_mode)
    if pre_seq_len is not None and mode not in ("ptune", "deep_ptune", None):
        raise InvalidOption(f"pre_seq_len is for virtual tokens; tuning_mode={tuning_mode!r} has none")
    if pre_seq_len is not None and (isinstance(pre_seq_len, bool) or not 1 <= pre_seq_len <= MAX_PROMPT_LENGTH):
        raise InvalidOption(f"pre_seq_len={pre_seq_len!r} is no number of virtual tokens from 1 to {MAX_PROMPT_LENGTH}")
    lora = {
        "lora_config": lora_config,
        "lora_rank": lora_rank,
        "lora_alpha": lora_alpha,
        "target_modules": target_modules,
    }
    given = [name for name, value in lora.items() if value is not None]
    if given and mode != "lora":
        raise InvalidOption(f"{given[0]} is for LoRA; say tuning_mode='lora' with it")
    if given and adapter is not None:
        raise InvalidOption(f"{given[0]} is for LoRA that begins anew; the adapter {adapter} has its own")
    if adapter is None:
        for name, value in {"adapter_revision": adapter_revision, "trainable": trainable}.items():
            if value is not None:
                raise InvalidOption(
                    f"{name} is for an adapter that is loaded; say adapter=FOLDER_OR_REPOSITORY with it"
                )
    if mode is None and adapter is None and pre_seq_len is not None:
        raise InvalidOption("pre_seq_len is for virtual tokens; say tuning_mode='ptune' or 'deep_ptune' with it")
    return TuningOptions(
        mode=mode,
        pre_seq_len=pre_seq_len,
        lora=lora_settings(lora_config, lora_rank, lora_alpha, target_modules) if mode == "lora" else None,
        adapter=adapter,
        adapter_revision=adapter_revision,
        force=force_adapter,
        trainable=trainable if trainable is not None else mode is not None or adapter is None,
    )


def _mode(wanted: str | None) -> Method | None:
    match wanted:
        case None | "ptune" | "deep_ptune" | "lora":
            return wanted
        case _:
            raise InvalidOption(f"tuning_mode={wanted!r} is not one of ptune, deep_ptune, lora, or None for none")
