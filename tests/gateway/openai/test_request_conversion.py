"""From requests to sequences."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.request_conversion import completion_request_sequences, template_message, tool_options
from swarm.gateway.openai.request_schema import ChatMessage, CompletionRequest, FunctionCall, parse_chat_request
from swarm.gateway.settings import GatewaySettings
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.tool_calls import ToolOptions
from swarm.generation.prompts import DEFAULT_COMPLETION_TOKENS, prompt_texts
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.models.tokenizers.prompts_here import prompts_here

CONTEXT = 32


@pytest.fixture(scope="module")
def served() -> Any:
    usual = SimpleNamespace(temperature=None, top_p=None, top_k=None)
    tokenizer = load_tokenizer(DEMO_FOLDER)
    model = SimpleNamespace(generation_config=usual)
    prompts = prompts_here(tokenizer)
    return SimpleNamespace(
        name="m", tokenizer=tokenizer, prompts=prompts, model=model, context_length=CONTEXT, vocabulary_size=1000
    )


@pytest.mark.parametrize(("prompt", "room"), [(4, DEFAULT_COMPLETION_TOKENS), (CONTEXT - 3, 3)])
def test_the_default_limit_fits_the_context(served, prompt, room):
    (work,) = completion_request_sequences(CompletionRequest(model="m", prompt=[5] * prompt), served, GatewaySettings())
    assert work.limit == room


def test_a_limit_beyond_the_context_is_an_error(served):
    words = "This model's maximum context length is 32 tokens.*room for 3 more; 4 were requested"
    with pytest.raises(InvalidGenerationRequest, match=words):
        completion_request_sequences(
            CompletionRequest(model="m", prompt=[5] * (CONTEXT - 3), max_tokens=4), served, GatewaySettings()
        )


def test_the_prompt_is_repeated_for_each_answer(served):
    works = completion_request_sequences(
        CompletionRequest(model="m", prompt=["Once", "upon a"], n=2), served, GatewaySettings()
    )
    assert prompt_texts(works, served) == ["Once", "Once", "upon a", "upon a"]


def test_the_number_of_texts_of_a_request_is_limited(served):
    def texts(prompts: int, n: int) -> int:
        request = CompletionRequest(model="m", prompt=["Once"] * prompts, n=n)
        return len(completion_request_sequences(request, served, GatewaySettings()))

    assert texts(32, 8) == 256
    with pytest.raises(BadRequest, match="prompts times n are 264 texts; one request may have 256 at most"):
        texts(33, 8)


@pytest.mark.parametrize(("asked", "default", "taken"), [(None, 20, 20), (5, 20, 5), (0, 20, 0), (-1, 20, -1)])
def test_top_k_can_be_switched_off(served, monkeypatch, asked, default, taken):
    monkeypatch.setattr(served.model.generation_config, "top_k", default)
    request = CompletionRequest(model="m", prompt=[5], top_k=asked, max_tokens=-1)
    (work,) = completion_request_sequences(request, served, GatewaySettings())
    assert work.top_k == taken
    assert work.limit == CONTEXT - 1


def test_the_interface_before_tools():
    """As libraries from before tools still write conversations."""
    call, answer = (
        ChatMessage(role="assistant", function_call=FunctionCall("weather", '{"city": "Bern"}')),
        ChatMessage(role="function", name="weather", content="12"),
    )
    (called,) = template_message(call)["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert template_message(answer) == {"role": "tool", "name": "weather", "content": "12"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_tool_choice_may_allow_some_of_the_tools(mode):
    def options(*names: str) -> ToolOptions:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        offered = [{"type": "function", "function": {"name": name}} for name in "abc"]
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": offered, "tool_choice": choice}
        return tool_options(parse_chat_request(json.dumps(body).encode()))

    found = options("c", "a")
    assert [function.name for function in found.functions] == ["a", "c"]
    assert found.choice == mode
    with pytest.raises(BadRequest, match="allows x, which is not in tools"):
        options("a", "x")
