"""A conversation as the tokens that a model was trained to answer.

transformers runs the checkpoint's template in a sandbox, which bounds neither time nor memory: `prompt_process` does. A
model without a template was not trained for conversations: it gets the texts as they are, separated by blank lines, and
continues them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swarm.errors import ChatTemplateError

ChatMessage = Mapping[str, Any]

MAX_PROMPT_CHARACTERS = 1 << 24
"""Of a conversation after the template has written it. No model has a context of so many tokens."""


def template_text(tokenizer: Any) -> str | None:
    """The source of the chat template, the one for tools if there are several; None if the model has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) and template else None


def conversation_tokens(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[Any] | None = None
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Args:
        messages: with `role` and `content`; `tool_calls` with their arguments as objects.
        tools: descriptions of functions, as JSON schema.

    Raises:
        ChatTemplateError: the template rejects the conversation, for example because of the order of its roles.
    """
    if template_text(tokenizer) is None:
        text = "\n\n".join(str(message["content"]) for message in messages if message.get("content"))
        return text_tokens(tokenizer, text)
    try:
        # Not tokenized here: the text that a template returns already contains the special tokens.
        text = tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a stranger's program, which may raise anything
        why = str(error) or type(error).__name__
        raise ChatTemplateError(f"the model's chat template does not accept this conversation: {why}") from error
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ChatTemplateError(f"the model's chat template made a text of {len(text)} characters of this conversation")
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain text that the model is asked to continue."""
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens
