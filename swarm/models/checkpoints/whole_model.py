"""Whole models in this process, for commands that compare a swarm with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, TextStreamer

from swarm.models.checkpoints.partial_loading import quiet_transformers

__all__ = ["TextStreamer", "load_local_model"]


def load_local_model(source: str | Path) -> Any:
    """The whole model, loaded in this process."""
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(str(source), trust_remote_code=False)
