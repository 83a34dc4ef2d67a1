"""Prompts that are made in this process, without limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarm.models.tokenizers.chat_template import conversation_tokens, text_tokens


def prompts_here(tokenizer: Any) -> Any:
    """Stands in for a `PromptProcess`."""
    return SimpleNamespace(
        conversation=lambda messages, tools=None, options=None: conversation_tokens(
            tokenizer, messages, tools, options
        ),
        text=lambda text, add_special=True: text_tokens(tokenizer, text, add_special),
        close=lambda: None,
    )
