"""A checkpoint's config, which is foreign input: read within limits, and checked before a model is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from swarm.common.files.atomic_file import read_small
from swarm.errors import ModelNotFound, UnsupportedModel
from swarm.models.checkpoints import config_limits, packed_weights
from swarm.models.checkpoints.gguf_weights import GgufFiles
from swarm.models.cutting import families


def read_config(fetch: Callable[[str], Path], source: str, gguf: GgufFiles | None = None) -> PreTrainedConfig:
    """The config of a checkpoint's config.json, or of its files in GGUF if they are given; a wrapper's language model.

    Raises:
        ModelNotFound: there is none, or no model can have it.
        UnsupportedModel: the model cannot be served.
    """
    what = f"config.json of {source}" if gguf is None else f"what {gguf.paths[0].name} says of its model"
    try:
        path = fetch(constants.CONFIG_NAME) if gguf is None else gguf.paths[0]
    except EntryNotFoundError:
        raise ModelNotFound(
            f"{source} has no config.json, so it is not a transformers model. Of a model in GGUF, download a file and "
            "give its path"
        ) from None
    try:
        # transformers writes infinities, for example as limits of time steps, so they are not refused here.
        described = json.loads(read_small(path, config_limits.MAX_CONFIG_BYTES)) if gguf is None else gguf.config()
        problem = config_limits.json_problem(described)
        if not problem:
            whole = whole_config(path, described) if gguf is None else _config_of(described)
            config = families.text_config(whole)
            families.check_supported(config)
            problem = config_limits.values_problem(partial(_value, config))
            if not problem and (problem := packed_weights.format_problem(packed_weights.quantization_of(config))):
                raise UnsupportedModel(f"{source} cannot be loaded: {problem}")
    except UnsupportedModel:
        raise
    except Exception as error:  # foreign input; each family's config class raises its own errors
        raise ModelNotFound(f"{what} cannot be used: {first_line(error)}") from error
    if problem:
        raise ModelNotFound(f"{what} cannot be used: {problem}")
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # before 5.20, transformers let gemma2 use sdpa, which knows no soft cap
    return config


def _value(config: PreTrainedConfig, name: str) -> Any:
    """One of a config's values; None if there is none, or if it is another one for each layer."""
    with suppress(RuntimeError):
        return getattr(config, name, None)
    return None


def whole_config(path: Path, described: dict[str, Any]) -> PreTrainedConfig:
    """The checkpoint's config as it is, of a wrapper too. Raises whatever its class does.

    Args:
        described: what the file says.
    """
    family = described.get("model_type")
    if family in families.SAME_FAMILY:
        return _config_of({**described, "model_type": families.SAME_FAMILY[family], "auto_map": None})
    if "auto_map" in described and family not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"a model of type {str(family)[:64]!r} comes with code of its own, and swarm never runs a repository's "
            "code; "
            + families.INSTEAD.get(
                str(family), "use one that transformers loads without trust_remote_code, if there is one"
            )
        )
    return AutoConfig.from_pretrained(str(path.parent), local_files_only=True, trust_remote_code=False)


def _config_of(described: dict[str, Any]) -> PreTrainedConfig:
    return CONFIG_MAPPING[described["model_type"]].from_dict(described)


def first_line(error: Exception) -> str:
    """What an error says, or its class if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
