"""Tokenizers, streamers and whole local models, for commands that show or compare text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from swarm.errors import CheckpointError
from swarm.models.checkpoints.partial_model import quiet

__all__ = ["TextStreamer", "load_local_model", "load_tokenizer"]


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The model's tokenizer.

    Args:
        source: local folder or hub id.
        revision: commit of a hub model; means nothing for a folder.

    Raises:
        CheckpointError: there is none that can be used.
    """
    options = {} if revision is None or Path(source).is_dir() else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(str(source), **options)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source} has no tokenizer that can be used: {str(error).splitlines()[0]}") from error


def load_local_model(source: str | Path) -> Any:
    """The whole model in this process."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(str(source))
