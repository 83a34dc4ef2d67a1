"""From OpenAI's requests to the sequences that have to be generated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.early_exit_options import early_exit_options
from swarm.gateway.openai.refused_fields import unsupported
from swarm.gateway.openai.request_schema import (
    MAX_TEXTS,
    UNLIMITED,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    MessageToolCall,
    ToolChoice,
)
from swarm.gateway.settings import GatewaySettings
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.tool_calls import ToolFunction, ToolOptions
from swarm.generation.prompts import chat_sequences, completion_sequences
from swarm.generation.sequence_request import ROOM_LEFT, SequenceRequest
from swarm.generation.served_model import ServedModel
from swarm.models.tokenizers.chat_template import THINKING_VARIABLES, TemplateOptions, reads_variable

MAX_TOKEN_ID_DIGITS = 9


def chat_request_sequences(
    request: ChatRequest, served: ServedModel, settings: GatewaySettings, *, max_tokens_fit: bool = False
) -> list[SequenceRequest]:
    """One sequence for each of the `n` answers.

    Args:
        max_tokens_fit: as in `SequenceRequest`.

    Raises:
        BadRequest: a message holds something other than text, or `early_exit` is not possible or not allowed.
        InvalidGenerationRequest: the model cannot do what is asked for.
        ChatTemplateError: the model's chat template does not accept the conversation.
    """
    max_tokens = request.max_completion_tokens or request.max_tokens
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return chat_sequences(
        served,
        [template_message(message) for message in request.messages],
        replace(_sequence_request(request, served, settings, max_tokens, top_logprobs), max_tokens_fit=max_tokens_fit),
        choices=request.n or 1,
        default_max_tokens=settings.default_max_tokens,
        tools=tool_options(request),
        template=template_options(request, served),
    )


def completion_request_sequences(
    request: CompletionRequest, served: ServedModel, settings: GatewaySettings
) -> list[SequenceRequest]:
    """`n` sequences for each of the prompts, in their order.

    Raises:
        BadRequest: the prompt has none of the allowed forms, the request asks for too many texts, or `early_exit` is
            not possible or not allowed.
        InvalidGenerationRequest: the model cannot do what is asked for.
    """
    prompts = request.prompts()
    count = len(prompts) * (request.n or 1)
    if count > MAX_TEXTS:
        raise BadRequest(f"prompts times n are {count} texts; one request may have {MAX_TEXTS} at most", param="n")
    asked = _sequence_request(request, served, settings, request.max_tokens, request.logprobs)
    asked = replace(asked, scores_prompt=bool(request.echo) and request.logprobs is not None)
    return completion_sequences(served, prompts, asked, request.n or 1)


def template_options(request: ChatRequest, served: ServedModel) -> TemplateOptions:
    """What a request asks of the chat template.

    Raises:
        BadRequest: the template does not read the reasoning effort that is asked for.
    """
    variables = dict(request.chat_template_kwargs or {})
    if (effort := request.reasoning_effort) is not None:
        switches = [name for name in THINKING_VARIABLES if reads_variable(served.tokenizer, name)]
        if effort == "none" and switches:
            variables.setdefault(switches[0], False)
        elif reads_variable(served.tokenizer, "reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        elif effort not in ("none", "medium"):  # which is how a model without it thinks
            raise unsupported("reasoning_effort", "the model's chat template does not read it; leave it out")
        elif effort == "medium" and switches:
            variables.setdefault(switches[0], True)
    return TemplateOptions(
        variables,
        continue_final=bool(request.continue_final_message),
        opens_answer=request.add_generation_prompt is not False,
    )


def tool_options(request: ChatRequest) -> ToolOptions:
    """The tools that a request offers, and its tool choice."""
    functions = tuple(tool.function for tool in request.tools or ())
    choice, single = request.tool_choice, request.parallel_tool_calls is False
    if isinstance(choice, ToolChoice) and choice.function is not None:
        return ToolOptions(functions, forced_function=choice.function.name, single_call=single)
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        return ToolOptions(_allowed(functions, choice.allowed_tools), choice.allowed_tools.mode, single_call=single)
    mode: Literal["auto", "none", "required"] = choice if isinstance(choice, str) else "auto"
    return ToolOptions(functions, mode, single_call=single)


def _allowed(functions: Sequence[ToolFunction], allowed: AllowedTools) -> tuple[ToolFunction, ...]:
    names = {tool.function.name for tool in allowed.tools}
    if unknown := names - {function.name for function in functions}:
        raise BadRequest(
            f"tool_choice allows {', '.join(sorted(unknown))[:100]}, which is not in tools", param="tool_choice"
        )
    return tuple(function for function in functions if function.name in names)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates take it.

    Raises:
        BadRequest: the content is not text.
    """
    content = message.template_content()
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    converted: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    calls = message.tool_calls or ([MessageToolCall(message.function_call)] if message.function_call else [])
    if calls:
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": _template_arguments(call)},
            }
            for call in calls
        ]
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if (thought := message.reasoning_content or message.reasoning) is not None:
        converted["reasoning_content"] = thought
    return converted


def _sequence_request(
    request: GenerationRequest,
    served: ServedModel,
    settings: GatewaySettings,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> SequenceRequest:
    return SequenceRequest(
        max_tokens=max_tokens if max_tokens != UNLIMITED else ROOM_LEFT,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}, served),
        seed=request.seed,
        stops=request.stops,
        end_tokens=request.stop_token_ids or (),
        prompt_tokens=request.truncate_prompt_tokens,
        form=request.form(),
        separate_thoughts=True,
        top_logprobs=top_logprobs,
        early_exit=early_exit_options(request.early_exit, settings, served),
        is_exit_asked=request.early_exit is not None,
        provisional=request.provisional,
    )


def _logit_bias(bias: Mapping[str, float], served: ServedModel) -> dict[int, float] | None:
    size = served.vocabulary_size
    for name in bias:
        if not name.isascii() or not name.isdigit() or len(name) > MAX_TOKEN_ID_DIGITS or int(name) >= size:
            raise InvalidGenerationRequest(
                f"{name[:20]!r} is not one of the model's {size} tokens", parameter="logit_bias"
            )
    return {int(name): value for name, value in bias.items()} or None


def _template_arguments(call: MessageToolCall) -> Any:
    """The arguments as an object, which templates expect; the text itself if it is not JSON."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
