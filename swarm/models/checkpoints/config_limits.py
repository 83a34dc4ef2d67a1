"""What the numbers of a checkpoint's config may be. A stranger wrote them, and a model is built from them.

They are checked in the JSON, before transformers sees it: its config classes already make lists with an entry for each
layer or label. The limits are far above those of any model that there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_CONFIG_BYTES = 4 << 20
MAX_BLOCKS = 2048
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_VOCABULARY = 1 << 26
MAX_POSITIONS = 1 << 28
MAX_COUNT = 1 << 16
MAX_NUMBER = 1 << 40
"""Of whole numbers whose names say nothing, such as the base of rotary positions."""

MAX_ENTRIES = 1 << 16
"""Of an array or an object."""

_LIMITS: tuple[tuple[re.Pattern[str], int, str], ...] = tuple(
    (re.compile(pattern), limit, what)
    for pattern, limit, what in (
        (
            r"(?:n|num)_(?:hidden_|decoder_|encoder_)?(?:layers?|blocks?)|(?:decoder|encoder)_layers",
            MAX_BLOCKS,
            "blocks",
        ),
        (r"(?:.*_)?vocab_size(?:_.*)?|n_words|n_token", MAX_VOCABULARY, "entries of the vocabulary"),
        (r".*(?:position|seq|context|ctx|window|length).*", MAX_POSITIONS, "positions"),
        (r".*(?:_|^)heads?", MAX_HEADS, "heads"),
        (r".*(?:hidden|embd|embed|inner|intermediate|ffn|_dim|d_model|d_kv|d_ff|rank).*", MAX_WIDTH, "values"),
        (r"(?:n|num)_.*|.*(?:layers|experts|blocks)", MAX_COUNT, "of them"),
    )
)
"""The first pattern that matches a number's whole name says how large it may be."""

_REQUIRED = (("num_hidden_layers", MAX_BLOCKS), ("hidden_size", MAX_WIDTH), ("vocab_size", MAX_VOCABULARY))
_IF_PRESENT = (("num_attention_heads", MAX_HEADS), ("max_position_embeddings", MAX_POSITIONS))


def json_problem(config: object) -> str:
    """Why the JSON of a config is refused; empty if it is not. Raises `RecursionError` if it is nested too deep."""
    if not isinstance(config, dict):
        return "it is not an object"
    return next(_problems("", config), "")


def _problems(name: str, value: object) -> Iterator[str]:
    if isinstance(value, (dict, list)):
        if len(value) > MAX_ENTRIES:
            yield f"{name or 'it'} has {len(value)} entries, more than {MAX_ENTRIES}"
            return
        pairs = value.items() if isinstance(value, dict) else ((name, one) for one in value)
        for inner, one in pairs:
            yield from _problems(inner, one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        limit, what = _limit(name)
        # A size may also be written as 4096.0. Fractions without a name that says so may be anything.
        if (isinstance(value, int) or limit < MAX_NUMBER) and not abs(value) <= limit:  # nor may it be NaN
            yield f"{name[:64]} is larger than {limit} {what}"


def _limit(name: str) -> tuple[int, str]:
    return next(((limit, what) for pattern, limit, what in _LIMITS if pattern.fullmatch(name)), (MAX_NUMBER, ""))


def values_problem(value_of: Callable[[str], Any]) -> str:
    """Why a config's sizes, by the names that all families have, cannot be those of a model; empty if they can."""
    for name, limit in (*_REQUIRED, *_IF_PRESENT):
        value = value_of(name)
        if value is None and (name, limit) in _IF_PRESENT:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            return f"{name} is {str(value)[:32]}, which is no whole number from 1 to {limit}"
    return ""


_SHARES = (("temperature", 1000.0), ("top_p", 1.0))
_TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def generation_problem(value_of: Callable[[str], Any]) -> str:
    """Why the settings of generation that are read here cannot be used; empty if they can. transformers checks others
    where it reads them."""
    for name, limit in _SHARES:
        value = value_of(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= limit
        ):
            return f"{name} is {str(value)[:32]}, which is no number from 0 to {limit:g}"
    top_k = value_of("top_k")
    if top_k is not None and not _is_whole(top_k, 0):
        return f"top_k is {str(top_k)[:32]}, which is no whole number from 0 on"
    for name in _TOKEN_IDS:
        value = value_of(name)
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if len(ids) > MAX_ENTRIES or not all(_is_whole(one, -1) for one in ids):
            return f"{name} is {str(value)[:32]}, which is neither a token nor a list of tokens"
    return ""


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_VOCABULARY
