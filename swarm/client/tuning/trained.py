"""The parameters that a client trains or has loaded from an adapter, and what servers get of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.client.tuning import saving
from swarm.client.tuning.lora import Lora, LoraSettings, new_lora, select_targets, stored_lora
from swarm.client.tuning.options import DEFAULT_VIRTUAL_TOKENS, TuningConfig
from swarm.errors import AdapterError, AdapterMismatch, InvalidOption, UsageError
from swarm.models.adapters.adapter_config import Method
from swarm.models.adapters.adapter_files import StoredAdapter
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.models.blockless_model import BlocklessModel
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting.model_inspection import find_lora_targets

logger = logging.getLogger(__name__)


class TrainedParameters:
    """The parameters of a model that training changes; all others are frozen. Implements `Adapter`.

    Args:
        loaded: the model without its blocks, frozen.
        checkpoint: what it was loaded from.

    Attributes:
        method: what was trained or is being trained; None for nothing.
    """

    def __init__(self, loaded: BlocklessModel, checkpoint: Checkpoint) -> None:
        self.model, self.head, self._path = loaded.model, loaded.head, loaded.path
        self.checkpoint = checkpoint
        self.method: Method | None = "head" if loaded.head else None
        for name in ("prompts", "deep_prompts"):
            self.model.register_parameter(name, None)
        self.model.register_module("lora", None)
        if loaded.head:
            _compute_in_float32(self.model.get_submodule(loaded.head))

    def part(self, block: int) -> BlockAdapterWeights | None:
        """What servers add to a block; see `Adapter.part`."""
        lora: Lora | None = self.model.lora
        factors = lora.factors(block) if lora is not None else ()
        prompt = self.model.deep_prompts[block] if self.model.deep_prompts is not None else None
        return BlockAdapterWeights(prompt, factors) if factors or prompt is not None else None

    def initialize(self, tuning: TuningConfig) -> None:
        """Add new parameters."""
        if tuning.mode == "lora":
            self._add_lora(tuning.lora or LoraSettings())
        elif tuning.mode is not None:
            count = tuning.options.pre_seq_len or DEFAULT_VIRTUAL_TOKENS
            self._add_prompts(count, is_deep=tuning.mode == "deep_ptune")
        self._finish(tuning.mode, trainable=True)

    def load(self, stored: StoredAdapter, tuning: TuningConfig) -> None:
        """Add the parameters of an adapter's files.

        Raises:
            AdapterMismatch: their shapes do not fit this model.
            AdapterError: the model has no place for some of them.
            InvalidOption: they contradict the caller's options.
        """
        config, source, count = stored.config, tuning.adapter, tuning.options.pre_seq_len
        if tuning.mode not in (None, config.method):
            raise InvalidOption(f"tuning_mode={tuning.mode!r}, but {source} was trained as {config.method!r}")
        if count not in (None, config.positions):
            raise InvalidOption(f"pre_seq_len={count}, but {source} has {config.positions} virtual tokens")
        if tuning.trainable and config.dropout:
            logger.warning("%s was trained with lora_dropout=%s; training goes on without it", source, config.dropout)
        if stored.prompts is not None:
            width = self.model.get_input_embeddings().weight.shape[1]
            if stored.prompts.shape[1] != width:
                raise AdapterMismatch(
                    f"{source} does not fit {self.checkpoint.name}: its virtual tokens are "
                    f"{stored.prompts.shape[1]} wide, and the model's embeddings {width}"
                )
            self.model.prompts = nn.Parameter(stored.prompts)
        if stored.deep_prompts is not None:
            self.model.deep_prompts = nn.Parameter(stored.deep_prompts)
        if config.method == "lora":
            self.model.lora = stored_lora(stored)
        self._load_heads(stored, source)
        self._finish(config.method, tuning.trainable)

    def names(self) -> frozenset[str]:
        """The names of these parameters in the model, and of all others that require gradients."""
        return frozenset(
            name for name, one in self.model.named_parameters() if one.requires_grad or name.startswith(self._own)
        )

    def save(self, folder: str | Path, *, with_state: bool = False) -> None:
        """Write the files of the adapter.

        Args:
            with_state: also write `model.safetensors`, with the parameters' names in the model, from which
                `transformers.Trainer` resumes training.

        Raises:
            UsageError: no parameter was trained.
        """
        saving.save(self.snapshot(), folder)
        if with_state:
            saving.save_state(self.model.state_dict(), folder)

    def snapshot(self) -> saving.TrainedSnapshot:
        """The current values of everything that is saved."""
        if self.method is None:
            raise UsageError(
                "this model has nothing to save: its weights belong to the swarm, and no parameter was trained; load "
                "it with tuning_mode=... to train"
            )
        model = self.model
        head = model.get_submodule(self.head).state_dict() if self.head else {}
        return saving.TrainedSnapshot(
            checkpoint=self.checkpoint,
            method=self.method,
            path=self._path,
            prompts=_values(model.prompts),
            deep_prompts=_values(model.deep_prompts),
            lora=model.lora,
            heads={f"{self.head}.{name}": tensor.detach().clone() for name, tensor in head.items()},
        )

    @property
    def _own(self) -> tuple[str, ...]:
        return ("prompts", "deep_prompts", "lora.", *((f"{self.head}.",) if self.head else ()))

    def _add_prompts(self, count: int, is_deep: bool) -> None:
        """Virtual tokens start as random words of the vocabulary (Lester et al. 2021), deep prompts as zero."""
        embeddings = self.model.get_input_embeddings()
        with torch.no_grad():
            words = embeddings(torch.randint(embeddings.weight.shape[0], (count,), device=embeddings.weight.device))
        self.model.prompts = nn.Parameter(words.float())
        if is_deep:
            config = self.checkpoint.config
            self.model.deep_prompts = nn.Parameter(torch.zeros(self.checkpoint.blocks, count, config.hidden_size))

    def _add_lora(self, settings: LoraSettings) -> None:
        config = self.checkpoint.config
        targets = select_targets(settings, find_lora_targets(config), self._path, config.model_type)
        self.model.lora = new_lora(targets, settings, self._path)

    def _load_heads(self, stored: StoredAdapter, source: str | Path | None) -> None:
        own = dict(self.model.get_submodule(self.head).state_dict(prefix=f"{self.head}.")) if self.head else {}
        for name, tensor in stored.heads.items():
            if name not in own:
                what = "its head; load it for classification" if not self.head and "score" in name else name[:200]
                raise AdapterError(f"{source} has weights that this model has no place for: {what}")
            if own[name].shape != tensor.shape:
                raise AdapterMismatch(
                    f"{source} does not fit: {name} has the shape {list(tensor.shape)}, not {list(own[name].shape)}"
                )
            own[name].copy_(tensor)
        if self.head and not stored.heads:
            logger.warning("%s has no head; %s is that of the checkpoint, or new and untrained", source, self.head)

    def _finish(self, method: Method | None, trainable: bool) -> None:
        self.method = method or self.method
        for name, one in self.model.named_parameters():
            one.requires_grad_(trainable and name.startswith(self._own))
        if self.model.lora is not None or self.model.deep_prompts is not None:
            self.model.remote_blocks.adapter = self
        if self.method is not None:
            _restrict_state_dict(self)


def _compute_in_float32(head: nn.Module) -> None:
    """Make a trained head float32, even if the model computes in another dtype."""
    head.float()

    def cast(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return tuple(value.float() if isinstance(value, torch.Tensor) else value for value in args)

    if not isinstance(head, nn.Linear):
        raise AdapterError(f"a {type(head).__name__} cannot be trained here: only linear heads are supported")
    head.register_forward_pre_hook(cast)


def _restrict_state_dict(trained: TrainedParameters) -> None:
    """Let the state dict hold the trained parameters only; all others come with the checkpoint and never change."""

    def leave_out(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        keep = trained.names()
        for name in [name for name in state if name.startswith(prefix) and name[len(prefix) :] not in keep]:
            del state[name]

    def may_be_missing(model: nn.Module, incompatible: Any) -> None:
        keep = tuple(trained.names())
        incompatible.missing_keys[:] = [
            name for name in incompatible.missing_keys if any(name == one or name.endswith(f".{one}") for one in keep)
        ]

    trained.model.register_state_dict_post_hook(leave_out)
    trained.model.register_load_state_dict_post_hook(may_be_missing)


def _values(parameter: nn.Parameter | None) -> torch.Tensor | None:
    return parameter.detach().clone() if parameter is not None else None
