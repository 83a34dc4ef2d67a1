"""Anthropic's own client against a gateway of a real swarm, and how its requests are read."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from swarm.gateway.dialects.anthropic_messages import (
    CHANGING_HEADER,
    AnthropicDialect,
    CountRequest,
    read_messages_request,
)
from swarm.gateway.openai.api_errors import BadRequest, ServiceUnavailable
from swarm.gateway.openai.request_conversion import template_message
from tests.gateway.scripts import EXPECTED, MODEL, WEATHER

TOOLS: Any = [
    {
        "name": "weather",
        "description": WEATHER["function"]["description"],
        "input_schema": WEATHER["function"]["parameters"],
    }
]


@pytest.fixture(scope="module")
def client(scripted):
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as made:
        yield made


def options(*said: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": one} if not isinstance(one, dict) else one for one in said]
    return {"model": MODEL, "messages": messages, "max_tokens": 200, **more}


def ask(client: anthropic.Anthropic, *said: Any, **more: Any) -> Any:
    return client.messages.create(**options(*said, **more))


def blocks(message: Any) -> list[tuple[Any, ...]]:
    """The content, without ids."""
    told = {"thinking": ("thinking",), "text": ("text",), "tool_use": ("name", "input")}
    return [(block.type, *(getattr(block, name) for name in told[block.type])) for block in message.content]


def streamed(client: anthropic.Anthropic, *said: Any, **more: Any) -> Any:
    with client.messages.stream(**options(*said, **more)) as stream:
        kinds = [event.type for event in stream]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        return stream.get_final_message()


@pytest.mark.parametrize("answer", [ask, streamed])
def test_thoughts_texts_and_calls_are_blocks(client, answer):
    said = answer(client, "think?")
    assert blocks(said) == [("thinking", "It was asked."), ("text", "So it is.")]
    assert (said.stop_reason, said.role, said.model) == ("end_turn", "assistant", MODEL)
    assert said.usage.output_tokens_details.thinking_tokens > 0
    calls = answer(client, "weather?", tools=TOOLS)
    assert blocks(calls) == [("text", "I shall look.\n"), *(("tool_use", *call) for call in EXPECTED)]
    assert calls.stop_reason == "tool_use"
    assert len({block.id for block in calls.content if block.type == "tool_use"}) == 2


def test_the_results_of_tools_go_into_the_conversation(client):
    calls = ask(client, "weather?", tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12"}
        for block in calls.content
        if block.type == "tool_use"
    ]
    said = ask(client, "weather?", {"role": "assistant", "content": calls.content}, results, tools=TOOLS)
    assert blocks(said) == [("text", "It is 12 degrees there.")]
    assert said.usage.input_tokens > calls.usage.input_tokens


def test_why_an_answer_ends(client):
    stopped = ask(client, "12", stop_sequences=["degrees", "there"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        *("It is 12 ", "stop_sequence"),
        "degrees",
    )
    assert ask(client, "12", max_tokens=2).stop_reason == "max_tokens"
    assert streamed(client, "12", max_tokens=2).stop_reason == "max_tokens"
    assert streamed(client, "12", max_tokens=100_000).stop_reason == "end_turn"
    once = ask(client, "12")
    assert (once.stop_reason, once.stop_sequence) == ("end_turn", None)


def test_an_answer_is_begun_by_the_request(client):
    assert ask(client, "Say", {"role": "assistant", "content": "hmm,"}).content[0].text == " and once more, it is so."


def test_thinking_can_be_turned_off(client):
    assert blocks(ask(client, "think?", thinking={"type": "disabled"})) == [("text", " and once more, it is so.")]
    assert blocks(ask(client, "think?", thinking={"type": "enabled", "budget_tokens": 1024}))[0][0] == "thinking"


def test_tokens_are_counted_as_they_are_charged(client):
    counted = client.messages.count_tokens(model=MODEL, system="Be kind.", messages=[{"role": "user", "content": "12"}])
    assert counted.input_tokens == ask(client, "12", system="Be kind.").usage.input_tokens


def test_the_models_are_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.display_name) == (MODEL, MODEL)
    assert client.models.retrieve(MODEL).max_input_tokens > 0


def test_errors_are_in_anthropics_form(client, scripted):
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, "12", model="nobody")
    assert missing.value.body["error"]["type"] == "not_found_error"
    for refused, reason in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"mood": "kind"}}, "mood is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "not supported|required field"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type 'document' is not supported"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ]:
        with pytest.raises(anthropic.BadRequestError, match=reason) as caught:
            ask(client, "12", **refused)
        assert caught.value.body["type"] == "error"
    raw = httpx.post(f"{scripted.url}/v1/messages", content=b"{", timeout=60)
    assert (raw.status_code, raw.json()["error"]["type"]) == (400, "invalid_request_error")
    last = AnthropicDialect().error(ServiceUnavailable("gone", code="x"))
    told = {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert last == b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"


def read(**fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    chat = read_messages_request(msgspec.json.encode(body), CountRequest)
    return [template_message(message) for message in chat.messages]


def test_what_changes_in_each_request_and_is_not_for_the_model_is_left_out():
    changing = {"type": "text", "text": f"{CHANGING_HEADER} v=1; id=5f3a"}
    kept = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    assert read(system=[changing, kept])[0] == {"role": "system", "content": "Be kind."}
    assert read(system=[changing]) == read()


def test_blocks_become_messages():
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": [{"type": "text", "text": "5"}]}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Well"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "What?"}, picture]},
    ]
    call = {"type": "function", "id": "t1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read(messages=messages) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well", "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "content": "5", "tool_call_id": "t1"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What?"}, {"type": "image", "url": "data:image/png;base64,AAAA"}],
        },
    ]


def test_edits_of_the_conversation_are_refused_unless_they_change_nothing():
    read(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    with pytest.raises(BadRequest, match="context_management"):
        read(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})
