"""What one model's client trains or has loaded: parameters of the model, and what servers are sent of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.client.tuning import saving
from swarm.client.tuning.lora import Lora, new_lora, stored_lora
from swarm.client.tuning.lora_config import LoraSettings, lora_targets
from swarm.client.tuning.options import DEFAULT_VIRTUAL_TOKENS, TuningOptions
from swarm.errors import AdapterError, AdapterMismatch, InvalidOption, UsageError
from swarm.models.adapters.adapter_config import Method
from swarm.models.adapters.adapter_files import StoredAdapter
from swarm.models.blockless_model import BlocklessModel
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting.lora_targets import find_lora_targets
from swarm.protocol.adapter_encoding import BlockAdapterWeights

logger = logging.getLogger(__name__)


class TrainedParameters:
    """The parameters that training changes. They belong to the model, whose parameters are frozen but for these.

    Args:
        heads: the model, frozen.
        checkpoint: what it was loaded from.
    """

    def __init__(self, heads: BlocklessModel, checkpoint: Checkpoint) -> None:
        self.model, self.head, self._path = heads.model, heads.head, heads.path
        self.checkpoint = checkpoint
        self.method: Method | None = "head" if heads.head else None
        for name in ("prompts", "deep_prompts"):
            self.model.register_parameter(name, None)
        self.model.register_module("lora", None)
        if heads.head:
            _compute_in_float32(self.model.get_submodule(heads.head))

    def part(self, block: int) -> BlockAdapterWeights | None:
        """What servers add to a block; see `swarm.client.wire.adapter.Adapter`."""
        lora: Lora | None = self.model.lora
        factors = lora.factors(block) if lora is not None else ()
        prompt = self.model.deep_prompts[block] if self.model.deep_prompts is not None else None
        return BlockAdapterWeights(prompt, factors) if factors or prompt is not None else None

    def begin(self, options: TuningOptions) -> None:
        """New parameters."""
        if options.mode == "lora":
            self._add_lora(options.lora or LoraSettings())
        elif options.mode is not None:
            self._add_prompts(options.pre_seq_len or DEFAULT_VIRTUAL_TOKENS, is_deep=options.mode == "deep_ptune")
        self._finish(options.mode, trainable=True)

    def load(self, stored: StoredAdapter, options: TuningOptions) -> None:
        """Parameters from files. Raises `AdapterMismatch` or `AdapterError` if they do not fit this model."""
        config = stored.config
        if options.mode not in (None, config.method):
            raise InvalidOption(f"tuning_mode={options.mode!r}, but {options.adapter} was trained as {config.method!r}")
        if options.pre_seq_len not in (None, config.positions):
            raise InvalidOption(f"pre_seq_len={options.pre_seq_len}, but {options.adapter} has {config.positions}")
        if options.trainable and config.dropout:
            logger.warning("%s was trained with lora_dropout=%s; it goes on without", options.adapter, config.dropout)
        if stored.prompts is not None:
            width = self.model.get_input_embeddings().weight.shape[1]
            if stored.prompts.shape[1] != width:
                raise AdapterMismatch(
                    f"{options.adapter} does not fit {self.checkpoint.name}: its virtual tokens are "
                    f"{stored.prompts.shape[1]} wide, and the model's embeddings {width}"
                )
            self.model.prompts = nn.Parameter(stored.prompts)
        if stored.deep_prompts is not None:
            self.model.deep_prompts = nn.Parameter(stored.deep_prompts)
        if config.method == "lora":
            self.model.lora = stored_lora(stored)
        self._load_heads(stored, options)
        self._finish(config.method, options.trainable)

    def names(self) -> frozenset[str]:
        """Names of the model's parameters that belong to what was trained, and of others that somebody trains."""
        return frozenset(
            name for name, one in self.model.named_parameters() if one.requires_grad or name.startswith(self._own)
        )

    def save(self, folder: str | Path, *, with_state: bool = False) -> None:
        """Write the files of the adapter.

        Args:
            with_state: write `model.safetensors`, too: the trained parameters by their names here, where
                `transformers.Trainer` looks for what it goes on with.

        Raises:
            UsageError: there is nothing that was trained.
        """
        saving.save(self.snapshot(), folder)
        if with_state:
            saving.save_state(self.model.state_dict(), folder)

    def push(self, repository: str, **options: Any) -> str:
        """Upload the files of the adapter; see `saving.push`."""
        return saving.push(self.snapshot(), repository, **options)

    def snapshot(self) -> saving.TrainedSnapshot:
        """What is saved, as it is now."""
        if self.method is None:
            raise UsageError(
                "there is nothing of this model to save: its weights are the swarm's, and nothing was trained. Load it "
                "with tuning_mode=... to train"
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
        """Virtual tokens begin as words of the vocabulary (Lester et al. 2021), deep prompts as nothing."""
        embeddings = self.model.get_input_embeddings()
        with torch.no_grad():
            words = embeddings(torch.randint(embeddings.weight.shape[0], (count,), device=embeddings.weight.device))
        self.model.prompts = nn.Parameter(words.float())
        if is_deep:
            config = self.checkpoint.config
            self.model.deep_prompts = nn.Parameter(torch.zeros(self.checkpoint.blocks, count, config.hidden_size))

    def _add_lora(self, settings: LoraSettings) -> None:
        config = self.checkpoint.config
        wanted = lora_targets(settings, find_lora_targets(config), self._path, config.model_type)
        self.model.lora = new_lora(wanted, settings, self._path)

    def _load_heads(self, stored: StoredAdapter, options: TuningOptions) -> None:
        mine = dict(self.model.get_submodule(self.head).state_dict(prefix=f"{self.head}.")) if self.head else {}
        for name, tensor in stored.heads.items():
            if name not in mine:
                what = "its head; load it for classification" if not self.head and "score" in name else name[:200]
                raise AdapterError(f"{options.adapter} has weights that this model has no place for: {what}")
            if mine[name].shape != tensor.shape:
                raise AdapterMismatch(
                    f"{options.adapter} does not fit: {name} is {list(tensor.shape)} and not {list(mine[name].shape)}"
                )
            mine[name].copy_(tensor)
        if self.head and not stored.heads:
            logger.warning("%s has no head; %s is as it was, or new and untrained", options.adapter, self.head)

    def _finish(self, method: Method | None, trainable: bool) -> None:
        self.method = method or self.method
        for name, one in self.model.named_parameters():
            one.requires_grad_(trainable and name.startswith(self._own))
        if self.model.lora is not None or self.model.deep_prompts is not None:
            self.model.remote_blocks.adapter = self
        if self.method is not None:
            _keep_state_small(self)


def _compute_in_float32(head: nn.Module) -> None:
    """What is trained is float32, also where the model that it reads from is not."""
    head.float()

    def cast(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return tuple(value.float() if isinstance(value, torch.Tensor) else value for value in args)

    if not isinstance(head, nn.Linear):
        raise AdapterError(f"a {type(head).__name__} is no linear head, which is all that can be trained here")
    head.register_forward_pre_hook(cast)


def _keep_state_small(trained: TrainedParameters) -> None:
    """The state of a tuned model is what was trained: all else comes with the model, and does not change."""

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
