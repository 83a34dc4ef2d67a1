"""Loading a checkpoint's tokenizer. Imports no torch, so that a process that only makes prompts is small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from swarm.errors import CheckpointError
from swarm.models.tokenizers.tokenizer_limits import tokenizer_problem

RUST_PANIC = "PanicException"
"""The class of what a bug in the tokenizers' Rust code raises. It has no public name, and is no `Exception`."""


def load_tokenizer(source: str | Path, revision: str | None = None, cache_dir: str | Path | None = None) -> Any:
    """The model's tokenizer, which runs no code of the checkpoint and decodes no token to a very long text.

    Nothing bounds how long it takes to load, or to make tokens of a text: a `PromptProcess` does.

    Args:
        source: local folder or hub id.
        revision: commit of a hub model; ignored for a folder.
        cache_dir: folder for files of the hub.

    Raises:
        CheckpointError: the checkpoint has no usable tokenizer.
    """
    options = {} if revision is None or Path(source).is_dir() else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), cache_dir=cache_dir, trust_remote_code=False, **options)
        problem = tokenizer_problem(tokenizer)
    except BaseException as error:  # foreign input; each family's tokenizer raises its own errors
        if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{source} has no usable tokenizer: {reason}") from error
    if problem:
        raise CheckpointError(f"the tokenizer of {source} is not used: {problem}")
    return tokenizer
