"""The end token that a checkpoint's tokenizer names, read from its files; the tokenizer itself is not loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.common.files.checked_json import fields, items, mapping, parse_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20


def tokenizer_end_token(fetch: Callable[[str], Path]) -> Any:
    """The token's id; None if the files name none or cannot be used: a model generates without a tokenizer.

    Args:
        fetch: see `Checkpoint`.
    """
    try:
        end, added = _read(fetch, "tokenizer_config.json", "eos_token", "added_tokens_decoder")
        if end is None:
            return None
        ids = {_content(one): int(token) for token, one in mapping(added or {}).items()}
        if _content(end) not in ids:
            (listed,) = _read(fetch, "tokenizer.json", "added_tokens")
            ids = {_content(one): one["id"] for one in items(listed or [])}
        return ids.get(_content(end))
    except Exception as error:  # noqa: BLE001  (foreign input, and perhaps a hub that does not answer)
        logger.debug("The tokenizer's files do not say which token ends a text: %s", str(error)[:200])
        return None


def add_end_token(model: Any, token: Any) -> None:
    """Let this token, if it is one of the model's, end what the model generates, besides those that do already."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if type(token) is int and 0 <= token < model.config.vocab_size and token not in ends:
        model.generation_config.eos_token_id = [*ends, token]


def _read(fetch: Callable[[str], Path], name: str, *wanted: str) -> list[Any]:
    """The values of a file's fields, None where missing."""
    path = fetch(name)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{name} has more than {MAX_FILE_BYTES} bytes")
    return fields(parse_json(path.read_bytes()), (), wanted, closed=False)


def _content(token: Any) -> Any:
    """The text of a token, which is written as such or as an object."""
    return token["content"] if isinstance(token, dict) else token
