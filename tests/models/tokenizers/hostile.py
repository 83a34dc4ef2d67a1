"""Tokenizers of strangers: copies of the demo model's with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""A chat template that practically never ends."""

HUGE = "{{ 'x' * 100000000000 }}"
"""A chat template that makes 100 GB."""


def save_tokenizer(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda one: None, template: str | None = None
) -> Path:
    """Copy the demo model's tokenizer, with `tokenizer.json` changed, and with another chat template."""
    for path in DEMO_FOLDER.glob("token*"):
        shutil.copy(path, folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    change(described)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    shutil.copy(DEMO_FOLDER / "config.json", folder)
    return folder


def exponential(described: dict[str, Any]) -> None:
    """Cut texts by a regular expression that takes time exponential in a run of the letter a."""
    described["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }


EXPONENTIAL_TEXT = "a" * 200 + "b"
