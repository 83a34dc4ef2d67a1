"""A conversation as the tokens that a model was trained to answer.

transformers runs the checkpoint's template in a sandbox, which bounds neither time nor memory: `prompt_process` does. A
model without a template was not trained for conversations: it gets the texts as they are, separated by blank lines, and
continues them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import ChatTemplateError

ChatMessage = Mapping[str, Any]

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""By which families of models a request says whether to think before answering."""

MAX_PROMPT_CHARACTERS = 1 << 24
"""Of a conversation after the template has written it. No model has a context of so many tokens."""


@dataclass(frozen=True)
class TemplateOptions:
    """What a request asks of the chat template, besides writing the conversation.

    Attributes:
        variables: further variables that the template may read, such as `enable_thinking`.
        continue_final: whether the prompt ends with the last message, so that the answer continues its text.
        opens_answer: whether the prompt ends with the beginning of an answer; not if it continues a message.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    opens_answer: bool = True


def template_text(tokenizer: Any) -> str | None:
    """The source of the chat template, the one for tools if there are several; None if the model has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) and template else None


def unusable_variable(tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """Why the chat template cannot be given these variables; None if it can.

    A variable that the template does not read would be ignored. `enable_thinking: false` may be: a model whose template
    does not know it does not think.
    """
    for name, value in variables.items():
        if name in _reserved_variables(tokenizer):
            return f"{name[:64]!r} is not for requests to set"
        if not reads_variable(tokenizer, name) and not (name in THINKING_VARIABLES and value is False):
            return f"the model's chat template does not know {name[:64]!r}; leave it out"
    return None


def _reserved_variables(tokenizer: Any) -> frozenset[str]:
    """The names that transformers does not hand to the template as variables of their own."""
    return frozenset(inspect.signature(type(tokenizer).apply_chat_template).parameters) | {"messages"}


def reads_variable(tokenizer: Any, name: str) -> bool:
    """Whether the chat template has this name in it."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    texts = templates.values() if isinstance(templates, Mapping) else (templates,)
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts if isinstance(text, str))


def conversation_tokens(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Any] | None = None,
    options: TemplateOptions | None = None,
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Args:
        messages: with `role` and `content`; `tool_calls` with their arguments as objects.
        tools: descriptions of functions, as JSON schema.
        options: the usual ones if None. Without a template, the answer continues the last message in any case.

    Raises:
        ChatTemplateError: the template rejects the conversation, for example because of the order of its roles, or
            cannot be given the variables.
    """
    options = options or TemplateOptions()
    if problem := unusable_variable(tokenizer, options.variables):
        raise ChatTemplateError(problem)
    if template_text(tokenizer) is None:
        text = "\n\n".join(str(message["content"]) for message in messages if message.get("content"))
        return text_tokens(tokenizer, text)
    # The text that a template returns already contains the special tokens.
    return text_tokens(tokenizer, conversation_text(tokenizer, messages, tools, options), add_special=False)


def conversation_text(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, options: TemplateOptions
) -> str:
    """What the chat template of a tokenizer or a processor writes. Raises `ChatTemplateError` if it rejects that.

    Templates for images may want every text as a list of parts, and write nothing of one that is not.
    """
    if _wants_parts(tokenizer):
        messages = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
            for one in messages
        ]
    return _written(tokenizer, messages, tools, options)


def _wants_parts(tokenizer: Any) -> bool:
    """Whether the template writes a list of parts and no text."""
    probe = "8172635445362718"
    for content in (probe, [{"type": "text", "text": probe}]):
        with suppress(ChatTemplateError):  # it may want something else than a single message
            if probe in _written(tokenizer, [{"role": "user", "content": content}], None, TemplateOptions()):
                return content is not probe
    return False


def _written(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, options: TemplateOptions
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=options.opens_answer and not options.continue_final,
            continue_final_message=options.continue_final,
            **options.variables,
        )
    except Exception as error:  # a template is a stranger's program, which may raise anything
        why = str(error) or type(error).__name__
        raise ChatTemplateError(f"the model's chat template does not accept this conversation: {why}") from error
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ChatTemplateError(f"the model's chat template made a text of {len(text)} characters of this conversation")
    return text


def text_tokens(tokenizer: Any, text: str, add_special: bool = True) -> list[int]:
    """Token ids of a plain text that the model is asked to continue.

    Args:
        add_special: whether to begin as the model's texts begin, such as with a token for that.

    Raises:
        ChatTemplateError: the text is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatTemplateError(
            "the text has half of a surrogate pair, which is not a valid character; remove it"
        ) from None
    tokens: list[int] = tokenizer(text, add_special_tokens=add_special)["input_ids"]
    return tokens
