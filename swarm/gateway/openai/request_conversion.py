"""From OpenAI's requests to the sequences that have to be generated."""

from __future__ import annotations

import json
from typing import Any, Literal

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.early_exit_options import early_exit_options
from swarm.gateway.openai.request_schema import (
    MAX_CHOICES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    MessageToolCall,
    NamedToolChoice,
)
from swarm.gateway.settings import GatewaySettings
from swarm.generation.formats.tool_calls import ToolFunction, ToolOptions
from swarm.generation.prompts import GenerationOptions, chat_sequences, completion_sequences
from swarm.generation.sequence_generation import SequenceRequest
from swarm.generation.served_model import ServedModel


def chat_request_sequences(
    request: ChatRequest, served: ServedModel, settings: GatewaySettings
) -> list[SequenceRequest]:
    """One sequence for each of the `n` answers.

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
        _generation_options(request, served, settings, max_tokens, top_logprobs),
        default_max_tokens=settings.default_max_tokens,
        tools=tool_options(request),
        response_format=request.response_format,
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
    if count > MAX_CHOICES:
        raise BadRequest(f"prompts times n are {count} texts; one request may have {MAX_CHOICES} at most", param="n")
    options = _generation_options(request, served, settings, request.max_tokens, request.logprobs)
    return completion_sequences(served, prompts, options)


def tool_options(request: ChatRequest) -> ToolOptions:
    """The tools that a request offers, and its tool choice."""
    functions = tuple(
        ToolFunction(tool.function.name, tool.function.description, tool.function.parameters, tool.function.strict)
        for tool in request.tools or ()
    )
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return ToolOptions(functions, forced_function=choice.function.name)
    mode: Literal["auto", "none", "required"] = choice or "auto"
    return ToolOptions(functions, mode)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates take it.

    Raises:
        BadRequest: the content is not text.
    """
    content = message.text()
    role = "system" if message.role == "developer" else message.role
    converted: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": _template_arguments(call)},
            }
            for call in message.tool_calls
        ]
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _generation_options(
    request: GenerationRequest,
    served: ServedModel,
    settings: GatewaySettings,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> GenerationOptions:
    return GenerationOptions(
        choices=request.n or 1,
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        seed=request.seed,
        stops=request.stops,
        top_logprobs=top_logprobs,
        early_exit=early_exit_options(request.early_exit, settings, served),
        is_exit_asked=request.early_exit is not None,
        provisional=request.provisional,
    )


def _template_arguments(call: MessageToolCall) -> Any:
    """The arguments as an object, which templates expect; the text itself if it is not JSON."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
