"""From a conversation or a prompt, and what is asked, to the sequences that have to be generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.errors import HubUnreachable
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.response_format import AnswerForm
from swarm.generation.formats.thinking import ConstraintBehindThoughts, ThinkingParser, ThinkingSyntax, TokenConstraint
from swarm.generation.formats.tool_calls import ToolCallParser, ToolOptions
from swarm.generation.sequence_request import ROOM_LEFT, RequestImages, SequenceRequest
from swarm.generation.served_model import ServedModel
from swarm.models.tokenizers.chat_template import TemplateOptions, unusable_variable
from swarm.models.tokenizers.image_prompt import image_urls

DEFAULT_CHAT_TOKENS = 1024
"""New tokens of a chat answer if the request sets no limit."""

DEFAULT_COMPLETION_TOKENS = 16
"""New tokens of a completion if the request sets no limit, as in OpenAI's API."""

MAX_MARKER_TOKENS = 16
"""Of the end of a prompt that may have begun a thought."""

Prompt = str | list[int]
"""A text or its token ids."""


def chat_sequences(
    served: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    asked: SequenceRequest,
    *,
    choices: int = 1,
    default_max_tokens: int = DEFAULT_CHAT_TOKENS,
    tools: ToolOptions | None = None,
    template: TemplateOptions | None = None,
) -> list[SequenceRequest]:
    """One sequence for each of the answers to a conversation.

    Args:
        messages: as chat templates take them.
        asked: what each answer is asked to be, without a prompt.
        choices: number of answers.
        tools: functions that the model may call.
        template: what is asked of the chat template; the usual if None.

    Raises:
        InvalidGenerationRequest: the model cannot do what is asked for.
        ChatTemplateError: the model's chat template does not accept the conversation.
    """
    tools = tools if tools is not None else ToolOptions()
    offered = _offered_tools(tools, served)
    prompt, images = conversation_prompt(served, messages, tools, template)
    if images is not None and asked.prompt_tokens is not None:
        raise InvalidGenerationRequest(
            "a prompt with images cannot be cut; leave truncate_prompt_tokens out", parameter="truncate_prompt_tokens"
        )
    prompt = _truncated(prompt, asked, served)
    asked = replace(_for_prompt(asked, served, prompt, default_max_tokens, "messages"), images=images)
    names = frozenset(function.name for function in tools.functions if tools.forced_function in (None, function.name))
    continued = str(messages[-1].get("content", "")) if template is not None and template.continue_final else None
    thoughts = _Thoughts.of(served, prompt, continued) if asked.separate_thoughts else None
    return [
        replace(
            _choice(asked, number),
            constraint=_chat_constraint(asked.form, served, tools, thoughts),
            tools=ToolCallParser(served.tool_syntax, names, tools.must_call, tools.single_call)
            if offered and served.tool_syntax is not None
            else None,
            thinking=thoughts.parser() if thoughts is not None else None,
        )
        for number in range(choices)
    ]


def conversation_prompt(
    served: ServedModel, messages: Sequence[Mapping[str, Any]], tools: ToolOptions, template: TemplateOptions | None
) -> tuple[list[int], RequestImages | None]:
    """The tokens of a conversation, and its images if it has some. Args and errors are those of `chat_sequences`."""
    _require_usable(template, served)
    offered = _offered_tools(tools, served)
    if next(image_urls(messages), None) is None:
        return served.prompts.conversation(messages, offered, template), None
    if served.no_images:
        raise InvalidGenerationRequest(served.no_images, parameter="messages", code="images_not_supported")
    prompt, arrays = served.prompts.conversation_with_images(messages, offered, template)
    return prompt, RequestImages(prompt, arrays)


def completion_sequences(
    served: ServedModel, prompts: Sequence[Prompt], asked: SequenceRequest, choices: int = 1
) -> list[SequenceRequest]:
    """`choices` sequences for each of the prompts, in their order.

    Raises:
        InvalidGenerationRequest: the model cannot do what is asked for.
    """
    requests = []
    for prompt in prompts:
        tokens = _truncated(_prompt_tokens(prompt, served), asked, served)
        behind = _for_prompt(asked, served, tokens, DEFAULT_COMPLETION_TOKENS, "prompt")
        for number in range(choices):
            constraint = None if asked.form is None else served.grammars.constraint(asked.form, ToolOptions(), None)
            requests.append(replace(_choice(behind, number), constraint=constraint))
    return requests


def embedding_sequences(served: ServedModel, prompts: Sequence[Prompt]) -> list[SequenceRequest]:
    """A sequence for the embedding of each prompt.

    Raises:
        InvalidGenerationRequest: one is too long, or empty.
        HubUnreachable: it is not known how this model's embeddings are made.
    """
    if served.pooling is None:
        raise HubUnreachable(
            f"how embeddings of {served.name} are made stands in a file that is not on this machine, and the model hub "
            "did not answer when the model was loaded; start again when it does"
        )
    asked = SequenceRequest(max_tokens=0, pooling=served.pooling)
    return [_for_prompt(asked, served, _prompt_tokens(prompt, served), 0, "input") for prompt in prompts]


def prompt_texts(requests: Sequence[SequenceRequest], served: ServedModel) -> list[str]:
    """The text of each sequence's prompt. A prompt that several sequences share is decoded once."""
    prompts = {id(request.prompt): request.prompt for request in requests}
    texts = {key: served.tokenizer.decode(prompt, skip_special_tokens=True) for key, prompt in prompts.items()}
    return [texts[id(request.prompt)] for request in requests]


@dataclass(frozen=True)
class _Thoughts:
    """Where the thoughts of the answers to a prompt are.

    Attributes:
        is_open: the prompt has begun a thought.
        may_begin: the answer may begin one.
        opens, closes: the markers' tokens; None if a marker is not a single one.
    """

    syntax: ThinkingSyntax
    is_open: bool
    may_begin: bool
    opens: int | None
    closes: int | None

    @classmethod
    def of(cls, served: ServedModel, prompt: Sequence[int], continued: str | None) -> _Thoughts | None:
        """None if the model does not think.

        Args:
            continued: the text that the answer continues; None if it begins one.
        """
        syntax = served.thinking_syntax
        if syntax is None:
            return None
        end = served.tokenizer.decode(prompt[-MAX_MARKER_TOKENS:], skip_special_tokens=False)
        begun = end[end.rfind(syntax.opens) :] if syntax.opens in end else ""
        is_open = syntax.is_open(continued or "") or begun.strip() == syntax.opens
        vocabulary = served.tokenizer.get_added_vocab()
        may_begin = not is_open and not continued and not syntax.is_over(end)
        return cls(syntax, is_open, may_begin, vocabulary.get(syntax.opens), vocabulary.get(syntax.closes))

    def parser(self) -> ThinkingParser:
        return ThinkingParser(self.syntax, self.is_open)

    def constraint(self, behind: TokenConstraint, served: ServedModel) -> TokenConstraint:
        """The constraint on what follows the thoughts.

        Raises:
            InvalidGenerationRequest: the thought that the prompt has begun cannot be told from what follows.
        """
        if self.closes is None and self.is_open:
            raise InvalidGenerationRequest(
                f"{served.name} thinks before it answers, so its answers cannot be kept to a form; ask it without one, "
                "or without thoughts, if its chat template knows enable_thinking"
            )
        opens = self.opens if self.may_begin else None
        if self.closes is None or (opens is None and not self.is_open):
            return behind
        return ConstraintBehindThoughts(behind, opens, self.closes, self.is_open, sorted(served.end_tokens))


def _chat_constraint(
    form: AnswerForm | None, served: ServedModel, tools: ToolOptions, thoughts: _Thoughts | None
) -> TokenConstraint | None:
    if form is None and not tools.must_call:
        return None
    constraint = served.grammars.constraint(form, tools, served.tool_syntax)
    return thoughts.constraint(constraint, served) if thoughts is not None and constraint is not None else constraint


def _require_usable(template: TemplateOptions | None, served: ServedModel) -> None:
    problem = unusable_variable(served.tokenizer, template.variables) if template is not None else None
    if problem is not None:
        raise InvalidGenerationRequest(f"chat_template_kwargs: {problem}", parameter="chat_template_kwargs")


def _for_prompt(
    asked: SequenceRequest, served: ServedModel, prompt: Sequence[int], default_max_tokens: int, parameter: str
) -> SequenceRequest:
    """What is asked for behind this prompt, with the defaults of the model's authors."""
    _require_tokens(asked.end_tokens, served, "stop_token_ids")
    defaults = served.model.generation_config
    unset: dict[str, Any] = {
        name: getattr(defaults, name, None)
        for name in ("temperature", "top_p", "top_k", "min_p")
        if getattr(asked, name) is None
    }
    limit = _limit(prompt, asked, served, default_max_tokens, parameter)
    return replace(asked, prompt=prompt, limit=limit, **unset)


def _choice(asked: SequenceRequest, number: int) -> SequenceRequest:
    """One of the answers to a prompt. Each has a seed of its own, so that they differ and can be reproduced."""
    return asked if asked.seed is None else replace(asked, seed=asked.seed + number)


def _truncated(prompt: list[int], asked: SequenceRequest, served: ServedModel) -> list[int]:
    """The end of the prompt, if the request asks for that."""
    keep = asked.prompt_tokens
    if keep is None:
        return prompt
    if keep <= 0:
        answer = asked.max_tokens if asked.max_tokens is not None and asked.max_tokens >= 0 else 1
        keep = max(1, served.context_length - answer)
    return prompt[-keep:]


def _require_tokens(tokens: Sequence[int], served: ServedModel, parameter: str) -> None:
    invalid = next((token for token in tokens if token >= served.vocabulary_size), None)
    if invalid is not None:
        raise InvalidGenerationRequest(
            f"token {invalid} is not one of the model's {served.vocabulary_size}", parameter=parameter
        )


def _prompt_tokens(prompt: Prompt, served: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        tokens = served.prompts.text(prompt)
        start = served.tokenizer.bos_token_id if served.tokenizer.bos_token_id is not None else 0
        return tokens or [start]  # the first new token needs one before it
    _require_tokens(prompt, served, "prompt")
    return prompt


def _limit(prompt: Sequence[int], asked: SequenceRequest, served: ServedModel, default: int, parameter: str) -> int:
    """How many tokens may be generated.

    Raises:
        InvalidGenerationRequest: prompt and answer would be longer than the model's context.
    """
    left, limit = served.context_length - len(prompt), asked.max_tokens
    if not prompt:
        raise InvalidGenerationRequest("there is nothing to answer: the conversation is empty", parameter=parameter)
    if left < (0 if limit == 0 else 1):
        raise InvalidGenerationRequest(
            f"{_context(served)}. The prompt has {len(prompt)} tokens; send a shorter one",
            parameter=parameter,
            code="context_length_exceeded",
        )
    if limit is not None and limit > left and not asked.max_tokens_fit:
        raise InvalidGenerationRequest(
            f"{_context(served)}. The prompt has {len(prompt)} tokens, which leaves room for {left} more; {limit} were "
            "requested; ask for fewer, or send a shorter prompt",
            parameter="max_tokens",
            code="context_length_exceeded",
        )
    if limit == ROOM_LEFT:
        return left
    return min(limit if limit is not None else default, left)


def _context(served: ServedModel) -> str:
    """How long texts may be, in OpenAI's words: programs that cut their prompts look for these, not for the code."""
    return f"This model's maximum context length is {served.context_length} tokens"


def _offered_tools(tools: ToolOptions, served: ServedModel) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them; None if there are none."""
    if not tools.functions or tools.choice == "none":
        return None
    if served.tool_syntax is None:
        raise InvalidGenerationRequest(
            f"{served.name} does not support tools: its chat template has no tool format that is known here",
            parameter="tools",
            code="tools_not_supported",
        )
    return [function.for_template() for function in tools.functions]
