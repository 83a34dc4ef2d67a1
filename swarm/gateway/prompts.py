"""From a checked request to the sequences that have to be generated for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from swarm.gateway.failures import BadRequest
from swarm.gateway.generation import Work
from swarm.gateway.requests import MAX_CHOICES, ChatMessage, ChatRequest, Common, CompletionRequest
from swarm.gateway.service import ServedModel
from swarm.generation.sampling import Constraint, Sampling
from swarm.generation.tool_calls import ToolParser
from swarm.models.checkpoints.chat_template import conversation_tokens, text_tokens

COMPLETION_TOKENS = 16
"""New tokens of a completion whose request does not say, as OpenAI has it."""


def chat_works(request: ChatRequest, served: ServedModel, default_tokens: int) -> list[Work]:
    """One sequence for each of the `n` answers. Raises `BadRequest` or `ChatTemplateError`."""
    tools = _tools(request, served)
    messages = [_message(message) for message in request.messages]
    prompt = conversation_tokens(served.tokenizer, messages, tools)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    wanted = request.max_completion_tokens or request.max_tokens
    room = _room(prompt, wanted, served, default_tokens, "messages")
    works = []
    for choice in range(request.n or 1):
        works.append(
            Work(
                prompt=prompt,
                max_tokens=room,
                sampling=_sampling(request, served, logprobs, choice),
                stops=request.stops,
                constraint=_constraint(request, served),
                tools=_parser(request, served) if tools else None,
            )
        )
    return works


def completion_works(request: CompletionRequest, served: ServedModel) -> list[Work]:
    """`n` sequences for each of the prompts, in their order. Raises `BadRequest`."""
    prompts = request.prompts()
    count = len(prompts) * (request.n or 1)
    if count > MAX_CHOICES:
        raise BadRequest(f"prompts times n are {count} texts; one request is {MAX_CHOICES} at most", param="n")
    works = []
    for one in prompts:
        prompt = _prompt_tokens(one, served)
        room = _room(prompt, request.max_tokens, served, COMPLETION_TOKENS, "prompt")
        for choice in range(request.n or 1):
            sampling = _sampling(request, served, request.logprobs, choice)
            works.append(Work(prompt=prompt, max_tokens=room, sampling=sampling, stops=request.stops))
    return works


def echoed(works: Sequence[Work], served: ServedModel) -> list[str]:
    """The text of each sequence's prompt, which is decoded once for all of its answers."""
    texts: dict[int, str] = {}
    for work in works:
        if id(work.prompt) not in texts:
            texts[id(work.prompt)] = served.tokenizer.decode(work.prompt, skip_special_tokens=True)
    return [texts[id(work.prompt)] for work in works]


def _prompt_tokens(prompt: str | list[int], served: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        tokens = text_tokens(served.tokenizer, prompt)
        start = served.tokenizer.bos_token_id if served.tokenizer.bos_token_id is not None else 0
        return tokens or [start]  # something has to stand before the first token
    wrong = next((token for token in prompt if token >= served.vocabulary), None)
    if wrong is not None:
        raise BadRequest(f"token {wrong} is not one of the model's {served.vocabulary}", param="prompt")
    return prompt


def _room(prompt: Sequence[int], wanted: int | None, served: ServedModel, default: int, param: str) -> int:
    """How many tokens may be generated. Raises `BadRequest` where the model cannot hold so long a text."""
    left = served.context_length - len(prompt)
    if not prompt:
        raise BadRequest("there is nothing to answer: the conversation is empty", param=param)
    if left < 1:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; texts of {served.name} have at most {served.context_length}",
            param=param,
            code="context_length_exceeded",
        )
    if wanted is not None and wanted > left:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, so there is room for {left} more, and {wanted} were asked for "
            f"(texts of {served.name} have at most {served.context_length})",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return wanted if wanted is not None else min(default, left)


def _sampling(request: Common, served: ServedModel, logprobs: int | None, choice: int) -> Sampling:
    """What the request says; else what the model's makers say; else OpenAI's defaults."""
    usual = served.model.generation_config
    temperature = request.temperature if request.temperature is not None else usual.temperature
    top_p = request.top_p if request.top_p is not None else usual.top_p
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=request.top_k or usual.top_k or None,
        presence=request.presence_penalty or 0.0,
        frequency=request.frequency_penalty or 0.0,
        bias=_bias(request, served),
        # Each of several answers has its own, so that they differ, and are the same again with the same seed.
        seed=None if request.seed is None else request.seed + choice,
        top_logprobs=logprobs,
    )


def _bias(request: Common, served: ServedModel) -> dict[int, float] | None:
    bias = {}
    for name, value in (request.logit_bias or {}).items():
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= served.vocabulary:
            raise BadRequest(f"{name[:20]!r} is not one of the model's {served.vocabulary} tokens", param="logit_bias")
        bias[int(name)] = value
    return bias or None


def _tools(request: ChatRequest, served: ServedModel) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    if served.tool_syntax is None:
        raise BadRequest(
            f"{served.name} does not know tools: its chat template has none in a form known here",
            param="tools",
            code="tools_not_supported",
        )
    return [msgspec.to_builtins(tool) for tool in request.tools]


def _parser(request: ChatRequest, served: ServedModel) -> ToolParser:
    assert served.tool_syntax is not None
    return ToolParser(served.tool_syntax, frozenset(tool.function.name for tool in request.tools or ()))


def _constraint(request: ChatRequest, served: ServedModel) -> Constraint | None:
    if request.response_format is None and request.tool_choice in (None, "none", "auto"):
        return None
    return served.grammars.constraint(request, served.tool_syntax)


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates know it."""
    content = message.text()
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _arguments(call: Any) -> Any:
    """Templates write an object; what is none stays a text."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
