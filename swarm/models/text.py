"""Tokenizers, streamers and whole local models, for commands that show or compare text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from swarm.models.loading import quiet

__all__ = ["TextStreamer", "load_local_model", "load_tokenizer"]


def load_tokenizer(source: str | Path) -> Any:
    """The model's tokenizer."""
    return AutoTokenizer.from_pretrained(str(source))


def load_local_model(source: str | Path) -> Any:
    """The whole model in this process."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(str(source))
