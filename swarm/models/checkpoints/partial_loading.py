"""Building part of a transformers model from part of a checkpoint.

transformers loads the tensors, so its own conversions (renamed tensors, experts fused into one tensor) apply as they do
for a whole model. Packed weights go where they belong beside it, except those of bitsandbytes.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import TextStreamer as TextStreamer  # for `swarm demo`: only this package may import transformers
from transformers.utils import logging as transformers_logging

from swarm.common.dtypes import HIDDEN_DTYPES, dtype_name
from swarm.errors import CheckpointError, InvalidOption
from swarm.models.checkpoints import packed_weights
from swarm.models.checkpoints.weight_places import Hold, Place, fuse_experts, take_places, wrong_shape
from swarm.models.weights.packed import PackedWeight

MAX_VALUES_A_STORED_ONE = 2
VALUES_A_BITSANDBYTES_ONE = 16
"""How many values a model may have for each one that is stored: a head shares those of the embeddings, and bitsandbytes
packs several into one. What a model has beyond its tensors is initialized, which takes memory for all of it, before
transformers says what is missing."""

SMALL_MODEL_VALUES = 1 << 22
"""No model of so many is refused for that."""

_LOADING = threading.Lock()
"""Held while transformers builds and fills a model. Meanwhile it replaces methods of its base class, such as
`tie_weights`; if two threads did so in turns, the replacements would stay, and models would lack their tied weights."""


def resolve_dtype(requested: str | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    """The dtype to compute in: the requested one, or the checkpoint's own for "auto".

    Raises `InvalidOption` if hidden states cannot have that dtype, or nothing says which one is the checkpoint's.
    """
    name = dtype_name(requested) if isinstance(requested, torch.dtype) else requested
    if name == "auto":
        stored = getattr(config, "dtype", None)
        if stored is None:
            raise InvalidOption(
                "neither config.json nor the weights that can be read here say which dtype the checkpoint has; choose "
                "float32, bfloat16 or float16 (--dtype, or dtype= in Python)"
            )
        name = str(stored).removeprefix("torch.")  # config.json may hold anything
    if name not in HIDDEN_DTYPES:
        raise InvalidOption(f"dtype {name!r} is not one of auto, {', '.join(HIDDEN_DTYPES)}")
    return HIDDEN_DTYPES[name]


def load_partial_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    cut: Callable[[PreTrainedModel], None],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    may_be_missing: Callable[[str], bool] = lambda name: False,
    converted: bool = False,
    hold: Hold | None = None,
) -> Any:
    """Build `model_class` on the meta device, let `cut` change it, then fill it with `tensors`.

    Args:
        cut: removes the parts of the model that are not loaded.
        tensors: they are taken out, so that their memory is free as soon as they are unpacked or fused.
        may_be_missing: whether the tensor of this name may be missing; the family then initializes it at random.
        converted: whether the tensors were converted already, when a model was loaded from which they come.
        hold: makes the layers for packed weights that stay packed; None to unpack all.

    Raises:
        CheckpointError: tensors are missing, do not fit the model, or are packed in a way that is not read.
    """
    quantization = None if converted else packed_weights.quantization_of(config)
    packed: dict[str, PackedWeight] = {} if converted else packed_weights.take_packed(tensors, quantization)
    places: list[Place] = []
    is_unpacked = not packed_weights.is_bitsandbytes(quantization)
    if is_unpacked:
        config = copy.copy(config)
        config.__dict__.pop("quantization_config", None)
    stored = sum(one.numel() for one in tensors.values()) + sum(math.prod(one.shape) for one in packed.values())
    integers = [name for name, one in tensors.items() if is_unpacked and not one.is_floating_point()]
    state = dict(tensors)
    tensors.clear()

    def build(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)  # type: ignore[misc]
        cut(self)
        _require_floats(self, integers)
        _require_stored(self, stored * (1 if is_unpacked else VALUES_A_BITSANDBYTES_ONE), may_be_missing)
        places.extend(take_places(self, packed))
        with torch.device("cpu"):
            for name in list(packed):
                state[name] = packed.pop(name).dense(dtype)
            fuse_experts(self, state, dtype)

    # transformers looks up its conversions by the class's name and module, and has none for modules of others.
    module = __name__ if converted else model_class.__module__
    cut_class: Any = type(model_class.__name__, (model_class,), {"__init__": build, "__module__": module})
    try:
        with _LOADING, quiet_transformers():
            model, report = cut_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # here, where the shapes can be told
            )
    except (RuntimeError, ValueError, KeyError) as error:
        reason = str(error)
        if "above report" in reason:  # there is none
            reason = "some tensors are missing that it combines, or have other shapes than config.json describes"
        raise CheckpointError(f"the weights do not fit a {config.model_type} model: {reason}") from error
    except ImportError as error:  # bitsandbytes is not installed
        raise CheckpointError(f"this checkpoint cannot be loaded here: {error}") from error
    finally:
        state.clear()  # the class, which lives as long as the model, would keep the tensors
    for name, found, described in sorted(report["mismatched_keys"]):
        raise wrong_shape(name, found, described)
    names = sorted(name for name in report["missing_keys"] if not may_be_missing(name))
    if names:
        raise CheckpointError(f"the checkpoint lacks {len(names)} tensors that the model needs, such as {names[0]}")
    if converted and report["unexpected_keys"]:
        raise CheckpointError(f"a {config.model_type} model has no tensor {sorted(report['unexpected_keys'])[0]}")
    packed_weights.refuse_companions(report["unexpected_keys"])
    _require_packed(model)
    while places:
        places.pop().fill(model, dtype, hold)
    if hold is not None:
        model.config._experts_implementation = "eager"  # the loop that asks for the experts' weights one by one
    model.requires_grad_(False)
    return model


def _require_floats(model: PreTrainedModel, integers: Iterable[str]) -> None:
    """Raise `CheckpointError` if one of the tensors with integers is for a parameter: they mean other numbers."""
    floats = {name for name, one in model.named_parameters() if one.is_floating_point()}
    for name in integers:
        if floats & {name, name.partition(".")[2], f"{model.base_model_prefix}.{name}"}:
            raise packed_weights.unscaled(name, "stored as integers")


def _require_packed(model: PreTrainedModel) -> None:
    """Raise `CheckpointError` if the config says that weights are quantized which are not.

    bitsandbytes would quantize them on a GPU, so that they compute something else than their digest says, and cannot
    compute with them elsewhere.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        weight: Any = getattr(module, "weight", None)
        if (kind == "Linear4bit" and weight.shape[-1] != 1) or (kind == "Linear8bitLt" and weight.dtype != torch.int8):
            raise CheckpointError(
                f"the config says that {name} is quantized, but its weights are stored as they are: remove "
                "quantization_config from config.json, and use --quant to quantize"
            )


def _require_stored(model: PreTrainedModel, stored: int, may_be_missing: Callable[[str], bool]) -> None:
    """Raise `CheckpointError` if a model on the meta device has many more values than are stored of it."""
    described = sum(one.numel() for name, one in model.named_parameters() if not may_be_missing(name))
    if described > stored * MAX_VALUES_A_STORED_ONE + SMALL_MODEL_VALUES:
        raise CheckpointError(
            f"the config describes {described} values, and the checkpoint holds {stored} for them: it lacks weights, "
            "or its config is that of another model"
        )


@contextmanager
def quiet_transformers() -> Any:
    """Silence transformers: its report of missing weights and its progress bar would mislead for a partial model."""
    before = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


def load_local_model(source: str | Path) -> Any:
    """The whole model in this process, for commands that compare a swarm with it."""
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(str(source), trust_remote_code=False)
