"""OpenAI's own client for responses, against a gateway of a real swarm."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest

from swarm.gateway.dialects.openai_responses import RESPONSES, ResponsesDialect, ResponsesRequest
from swarm.gateway.openai.api_errors import BadRequest, ServiceUnavailable
from swarm.gateway.openai.dialect import StreamEvent
from swarm.gateway.openai.request_conversion import template_message
from swarm.gateway.openai.request_schema import decode_request
from tests.gateway.scripts import EXPECTED, MODEL, WEATHER

TOOLS: Any = [{"type": "function", **WEATHER["function"], "strict": True}]


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=scripted.api, api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, said: Any, **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=said, **more)


def streamed(client: openai.OpenAI, said: Any, **more: Any) -> Any:
    events = list(ask(client, said, stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole == events[-1].response.output_text
    return events[-1].response


def items(response: Any) -> list[tuple[Any, ...]]:
    """The output, without ids."""
    return [
        (item.type, item.name, msgspec.json.decode(item.arguments))
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content).strip())
        for item in response.output
    ]


@pytest.mark.parametrize("answer", [ask, streamed])
def test_thoughts_texts_and_calls_are_items(client, answer):
    said = answer(client, "think?")
    assert items(said) == [("reasoning", "It was asked."), ("message", "So it is.")]
    assert (said.status, said.model, said.error) == ("completed", MODEL, None)
    assert 0 < said.usage.output_tokens_details.reasoning_tokens < said.usage.output_tokens
    called = answer(client, "weather?", tools=TOOLS)
    assert items(called) == [("message", "I shall look."), *(("function_call", *call) for call in EXPECTED)]


def test_a_conversation_goes_on_by_the_name_of_its_last_response(client):
    kind = "Be kind. " * 10
    first = ask(client, "weather?", tools=TOOLS, instructions=kind)
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
    second = ask(client, outputs, previous_response_id=first.id, tools=TOOLS, instructions=kind)
    assert items(second) == [("message", "It is 12 degrees there.")]
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2
    whole = ask(client, ["weather?", *first.output, *outputs][1:], tools=TOOLS)
    assert items(whole) == items(second)
    third = ask(client, "think?", previous_response_id=second.id, instructions=kind)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_responses_are_kept_unless_the_request_says_otherwise(client):
    kept, other = ask(client, "12"), ask(client, "12", store=False)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    for missing in (other.id, "resp_nobody"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
    named = [{"type": "item_reference", "id": kept.output[0].id}, {"role": "user", "content": "think?"}]
    assert items(ask(client, named))[1] == ("message", "So it is.")
    client.responses.delete(kept.id)
    for gone in ({"previous_response_id": kept.id}, {"said": named}):
        with pytest.raises(openai.BadRequestError, match="not kept any more"):
            ask(client, **{"said": "12", **gone})


def test_functions_may_be_in_a_namespace(client):
    space: Any = {"type": "namespace", "name": "outside", "description": "The world.", "tools": TOOLS}
    calls = [item for item in ask(client, "weather?", tools=[space]).output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [("outside", "weather")] * 2


def test_an_answer_that_is_cut_off_is_incomplete(client):
    for answer in (ask, streamed):
        said = answer(client, "12", max_output_tokens=2)
        assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert said.output[0].status == "incomplete"
    assert ask(client, "12", max_output_tokens=100_000).status == "completed"


class Place(pydantic.BaseModel):
    """The form of an answer."""

    city: Literal["Bern", "Basel"]


def test_answers_have_a_form_that_is_asked_for(client):
    found = client.responses.parse(model=MODEL, input="json?", text_format=Place)
    assert found.output_parsed.city in ("Bern", "Basel")
    assert found.text.format.type == "json_schema"


def test_log_probabilities(client):
    said = streamed(client, "12", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = said.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)


def test_what_is_not_supported_is_refused_by_name(client):
    for refused, reason in [
        ({"tools": [{"type": "web_search"}]}, "tools.0. of type 'web_search' is not supported"),
        ({"said": [{"type": "computer_call", "id": "x"}]}, "input.0. of type 'computer_call'"),
        ({"said": []}, "1 to 4096 messages"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"extra_body": {"mood": "kind"}}, "mood is not supported"),
        ({"reasoning": {"effort": "high"}}, "does not read it"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"said": [{"type": "item_reference", "id": "nobody"}]}, "no item 'nobody'"),
    ]:
        with pytest.raises(openai.BadRequestError, match=reason):
            ask(client, **{"said": "12", **refused})


def test_a_stream_that_fails_ends_with_a_numbered_error():
    dialect = ResponsesDialect()
    dialect.event(StreamEvent({"type": "response.created"}, "response.created"))
    failed = msgspec.json.decode(dialect.error(ServiceUnavailable("gone", code="x")).partition(b"data: ")[2])
    assert (failed["type"], failed["code"], failed["sequence_number"]) == ("error", "x", 1)
    assert failed["error"]["message"] == "gone"  # makes OpenAI's clients raise an error


def read(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = msgspec.json.encode({"model": "m", "input": items, **fields})
    asked = decode_request(ResponsesRequest, body, RESPONSES)
    return [template_message(message) for message in asked.chat(asked.items).messages]


def test_what_the_model_did_without_a_pause_is_one_message():
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    def called(name: str) -> dict[str, Any]:
        return {"type": "function", "id": name, "function": {"name": "f", "arguments": {}}}

    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Well", "annotations": []}]}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "5"}]}
    found = read({"role": "user", "content": "Hi"}, thought, said, call("a"), call("b"), output, said)
    assert found == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Well",
            "tool_calls": [called("a"), called("b")],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "content": "5", "tool_call_id": "a"},
        {"role": "assistant", "content": "Well"},
    ]
    with pytest.raises(BadRequest):
        read({"role": "nobody", "content": "Hi"})
