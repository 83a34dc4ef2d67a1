"""Building part of a transformers model from part of a checkpoint.

transformers does the loading, so its own conversions (renamed tensors, experts fused into one) apply as they do for a
whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from swarm.errors import CheckpointError, InvalidOption
from swarm.protocol.compression import DTYPES, dtype_name


def resolve_dtype(requested: str | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    """The dtype to compute in: the one asked for, or for "auto" the checkpoint's own.

    Raises `InvalidOption` for a dtype that hidden states cannot have.
    """
    name = dtype_name(requested) if isinstance(requested, torch.dtype) else requested
    if name == "auto":
        stored = getattr(config, "dtype", None) or torch.float32
        name = stored if isinstance(stored, str) else dtype_name(stored)
    if name not in DTYPES:
        raise InvalidOption(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_cut(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    cut: Callable[[PreTrainedModel], None],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    may_be_new: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Build `model_class` on the meta device, let `cut` change it, then fill it with `tensors`.

    Args:
        may_be_new: whether a tensor of this name may be missing; the family then initialises it at random.

    Raises:
        CheckpointError: the tensors do not fill the model, do not fit it, or need a package that is not here.
    """

    def build(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)  # type: ignore[misc]
        cut(self)

    # The class keeps its family's name and module: transformers looks conversions up by them.
    cut_class: Any = type(
        model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__}
    )
    try:
        with quiet():
            model, report = cut_class.from_pretrained(
                None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the weights do not fit a {config.model_type} model: {error}") from error
    except ImportError as error:  # a way of quantizing that needs a package of its own
        raise CheckpointError(f"this checkpoint cannot be loaded here: {error}") from error
    names = sorted(name for name in report["missing_keys"] if not may_be_new(name))
    if names:
        raise CheckpointError(f"the checkpoint lacks {len(names)} tensors that the model needs, such as {names[0]}")
    model.requires_grad_(False)
    return model


@contextmanager
def quiet() -> Any:
    """transformers reports on weights that a cut model does not have, and draws a progress bar; both would mislead."""
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
