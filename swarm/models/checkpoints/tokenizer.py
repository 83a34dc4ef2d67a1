"""Tokenizers, streamers and whole local models, for commands that show or compare text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from swarm.errors import CheckpointError
from swarm.models.checkpoints.partial_loading import quiet_transformers

__all__ = ["TextStreamer", "load_local_model", "load_tokenizer"]


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The model's tokenizer.

    Args:
        source: local folder or hub id.
        revision: commit of a hub model; ignored for a folder.

    Raises:
        CheckpointError: the checkpoint has no usable tokenizer.
    """
    options = {} if revision is None or Path(source).is_dir() else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(str(source), **options)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source} has no usable tokenizer: {str(error).splitlines()[0]}") from error


def load_local_model(source: str | Path) -> Any:
    """The whole model, loaded in this process."""
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(str(source))
