"""The files of a model that travel beside its tensors: JSON only, without anything that names code or other files.

What a client or a server needs of a model beyond tensors is its config, its settings of generation and its tokenizer.
A chat template that has a file of its own travels as a field of the tokenizer's config, where transformers looks for it
as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import EntryNotFoundError

from swarm.common.files.checked_json import to_json
from swarm.errors import CheckpointError, ModelNotFound
from swarm.models.checkpoints import config_limits
from swarm.models.checkpoints.checkpoint import Checkpoint

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

MAX_FILE_BYTES = {
    CONFIG: config_limits.MAX_CONFIG_BYTES,
    GENERATION_CONFIG: config_limits.MAX_CONFIG_BYTES,
    TOKENIZER_CONFIG: 8 << 20,
    "tokenizer.json": 64 << 20,
    "special_tokens_map.json": 1 << 20,
    "added_tokens.json": 8 << 20,
    "vocab.json": 32 << 20,
}
"""The files that travel, each with its largest size."""

MAX_TEMPLATE_BYTES = 1 << 20

_CODE = ("auto_map", "custom_pipelines", "custom_generate")
"""Fields by which transformers finds Python code, wherever they stand."""

_TOKENIZER_FIELDS_LEFT_OUT = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")
"""Fields of a tokenizer's config that name a path of the machine where it was saved."""


def offered_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint on this machine that travel, by name; nothing is downloaded.

    Raises `CheckpointError` if one of them cannot be shared: the message says why.
    """
    found: dict[str, bytes] = {}
    for name, limit in MAX_FILE_BYTES.items():
        data = _read(checkpoint, name, limit)
        if data is not None:
            found[name] = data
    template = _read(checkpoint, CHAT_TEMPLATE, MAX_TEMPLATE_BYTES)
    if template is not None and len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{CHAT_TEMPLATE} of {checkpoint.source} cannot be shared with other peers: it has more than "
            f"{MAX_TEMPLATE_BYTES} bytes"
        )
    if CONFIG in found:
        found[CONFIG] = _with_dtype(found[CONFIG], checkpoint)
    if TOKENIZER_CONFIG in found:
        found[TOKENIZER_CONFIG] = _without_paths(found[TOKENIZER_CONFIG], template)
    for name, data in found.items():
        problem = file_problem(name, data)
        if problem:
            raise CheckpointError(f"{name} of {checkpoint.source} cannot be shared with other peers: {problem}")
    return found


def file_problem(name: str, data: bytes) -> str:
    """Why a file from another peer is not used; empty if it is. Pure."""
    limit = MAX_FILE_BYTES.get(name)
    if limit is None:
        return "no file of this name travels: only " + ", ".join(MAX_FILE_BYTES)
    if len(data) > limit:
        return f"it has {len(data)} bytes; at most {limit} are allowed"
    try:
        value = json.loads(data.decode())  # as it is read later: bytes might be taken for another encoding
        code = next(_code_fields(value), None)
        if code is not None:
            return f"it has the field {code}, which names Python code, and code does not travel"
        return _content_problem(name, value)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"


def _content_problem(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return "it is not an object"
    if name == CONFIG:
        return config_limits.json_problem(value)
    if name == GENERATION_CONFIG:
        return config_limits.generation_problem(value.get)
    if name == TOKENIZER_CONFIG:
        path = next((field for field in _TOKENIZER_FIELDS_LEFT_OUT if field in value), None)
        return f"it has the field {path}, which names a path" if path is not None else ""
    return ""


def _code_fields(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _CODE:
                yield name
            yield from _code_fields(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _code_fields(inner)


def _with_dtype(data: bytes, checkpoint: Checkpoint) -> bytes:
    """A config that names the checkpoint's dtype, which else follows from a file that a receiver may not have."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data  # it is refused for that
    dtype = getattr(checkpoint.config, "dtype", None)
    if not isinstance(value, dict) or value.get("dtype") or value.get("torch_dtype") or dtype is None:
        return data
    return json.dumps({**value, "dtype": str(dtype).removeprefix("torch.")}, indent=2).encode() + b"\n"


def _without_paths(data: bytes, template: bytes | None) -> bytes:
    """A tokenizer's config without fields that name paths, and with the chat template."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data  # it is refused for that
    if not isinstance(value, dict):
        return data
    kept = {name: inner for name, inner in value.items() if name not in _TOKENIZER_FIELDS_LEFT_OUT}
    if template is not None:  # transformers prefers it to the field, too
        kept["chat_template"] = template.decode("utf-8", "replace")
    if kept == value:
        return data
    try:
        return to_json(kept, indent=2) + b"\n"
    except ValueError as error:
        raise CheckpointError(f"{TOKENIZER_CONFIG} cannot be shared with other peers: {error}") from None


def _read(checkpoint: Checkpoint, name: str, limit: int) -> bytes | None:
    try:
        path = checkpoint.cached(name)
        if path is None:
            return None
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (EntryNotFoundError, ModelNotFound):
        return None
    except OSError as error:
        raise CheckpointError(f"{name} of {checkpoint.source} cannot be read: {error.strerror or error}") from None
