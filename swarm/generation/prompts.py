"""From a conversation or a prompt, and options, to the sequences that have to be generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.client.early_exit.options import EarlyExit
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.tool_calls import ToolCallParser, ToolOptions
from swarm.generation.sampling import SamplingOptions
from swarm.generation.sequence_generation import SequenceRequest
from swarm.generation.served_model import ServedModel

DEFAULT_CHAT_TOKENS = 1024
"""New tokens of a chat answer if the request sets no limit."""

DEFAULT_COMPLETION_TOKENS = 16
"""New tokens of a completion if the request sets no limit, as in OpenAI's API."""

MAX_TOKEN_ID_DIGITS = 9

Prompt = str | list[int]
"""A text or its token ids."""


@dataclass(frozen=True)
class GenerationOptions:
    """How the answers to a request are generated. None takes the model's own default, and OpenAI's if it has none.

    Attributes:
        choices: answers to each prompt.
        logit_bias: by token id, written in decimal.
        stops: texts at which an answer ends.
        top_logprobs: likeliest tokens to report for each position; None reports no log probabilities.
        early_exit: when tokens leave before the last block; None for never.
        is_exit_asked: whether the request asks for that itself, rather than having it by default.
        provisional: whether the text of tokens that left is shown before they are verified.
    """

    choices: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    early_exit: EarlyExit | None = None
    is_exit_asked: bool = False
    provisional: bool = False


def chat_sequences(
    served: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    options: GenerationOptions,
    *,
    default_max_tokens: int = DEFAULT_CHAT_TOKENS,
    tools: ToolOptions | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> list[SequenceRequest]:
    """One sequence for each of the `options.choices` answers to a conversation.

    Args:
        messages: as chat templates take them.
        tools: functions that the model may call.
        response_format: as in OpenAI's API.

    Raises:
        InvalidGenerationRequest: the model cannot do what is asked for.
        ChatTemplateError: the model's chat template does not accept the conversation.
    """
    tools = tools if tools is not None else ToolOptions()
    offered = _offered_tools(tools, served)
    prompt = served.prompts.conversation(messages, offered)
    max_tokens = _max_tokens(prompt, options.max_tokens, served, default_max_tokens, "messages")
    names = frozenset(function.name for function in tools.functions)
    return [
        SequenceRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=_sampling_options(options, served, choice),
            stops=options.stops,
            constraint=(
                served.grammars.constraint(response_format, tools, served.tool_syntax)
                if response_format is not None or tools.must_call
                else None
            ),
            tools=ToolCallParser(served.tool_syntax, names) if offered and served.tool_syntax is not None else None,
            early_exit=options.early_exit,
            is_exit_asked=options.is_exit_asked,
            provisional=options.provisional,
        )
        for choice in range(options.choices)
    ]


def completion_sequences(
    served: ServedModel, prompts: Sequence[Prompt], options: GenerationOptions
) -> list[SequenceRequest]:
    """`options.choices` sequences for each of the prompts, in their order.

    Raises:
        InvalidGenerationRequest: the model cannot do what is asked for.
    """
    requests = []
    for prompt in prompts:
        tokens = _prompt_tokens(prompt, served)
        max_tokens = _max_tokens(tokens, options.max_tokens, served, DEFAULT_COMPLETION_TOKENS, "prompt")
        for choice in range(options.choices):
            sampling = _sampling_options(options, served, choice)
            requests.append(
                SequenceRequest(
                    tokens,
                    max_tokens,
                    sampling,
                    options.stops,
                    early_exit=options.early_exit,
                    is_exit_asked=options.is_exit_asked,
                    provisional=options.provisional,
                )
            )
    return requests


def prompt_texts(requests: Sequence[SequenceRequest], served: ServedModel) -> list[str]:
    """The text of each sequence's prompt. A prompt that several sequences share is decoded once."""
    texts: dict[int, str] = {}
    for request in requests:
        if id(request.prompt) not in texts:
            texts[id(request.prompt)] = served.tokenizer.decode(request.prompt, skip_special_tokens=True)
    return [texts[id(request.prompt)] for request in requests]


def _prompt_tokens(prompt: Prompt, served: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        tokens = served.prompts.text(prompt)
        start = served.tokenizer.bos_token_id if served.tokenizer.bos_token_id is not None else 0
        return tokens or [start]  # the first new token needs one before it
    invalid = next((token for token in prompt if token >= served.vocabulary_size), None)
    if invalid is not None:
        raise InvalidGenerationRequest(
            f"token {invalid} is not one of the model's {served.vocabulary_size}", parameter="prompt"
        )
    return prompt


def _max_tokens(prompt: Sequence[int], limit: int | None, served: ServedModel, default: int, parameter: str) -> int:
    """How many tokens may be generated.

    Raises:
        InvalidGenerationRequest: prompt and answer would be longer than the model's context.
    """
    left = served.context_length - len(prompt)
    if not prompt:
        raise InvalidGenerationRequest("there is nothing to answer: the conversation is empty", parameter=parameter)
    if left < 1:
        raise InvalidGenerationRequest(
            f"the prompt has {len(prompt)} tokens, but the context of {served.name} is {served.context_length} tokens",
            parameter=parameter,
            code="context_length_exceeded",
        )
    if limit is not None and limit > left:
        raise InvalidGenerationRequest(
            f"the prompt has {len(prompt)} tokens, which leaves room for {left} more; {limit} were requested "
            f"(the context of {served.name} is {served.context_length} tokens)",
            parameter="max_tokens",
            code="context_length_exceeded",
        )
    return limit if limit is not None else min(default, left)


def _sampling_options(options: GenerationOptions, served: ServedModel, choice: int) -> SamplingOptions:
    """The request's options, else those of the model's authors, else OpenAI's defaults."""
    defaults = served.model.generation_config
    temperature = options.temperature if options.temperature is not None else defaults.temperature
    top_p = options.top_p if options.top_p is not None else defaults.top_p
    return SamplingOptions(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=options.top_k or defaults.top_k or None,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        logit_bias=_logit_bias(options.logit_bias or {}, served),
        # Each of several answers has a seed of its own, so that they differ and can still be reproduced.
        seed=None if options.seed is None else options.seed + choice,
        top_logprobs=options.top_logprobs,
    )


def _logit_bias(bias: Mapping[str, float], served: ServedModel) -> dict[int, float] | None:
    size = served.vocabulary_size
    for name in bias:
        if not name.isascii() or not name.isdigit() or len(name) > MAX_TOKEN_ID_DIGITS or int(name) >= size:
            raise InvalidGenerationRequest(
                f"{name[:20]!r} is not one of the model's {size} tokens", parameter="logit_bias"
            )
    return {int(name): value for name, value in bias.items()} or None


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
