"""Tools and response formats over HTTP: OpenAI's client, a real swarm, models whose answers are known."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateway.scripts import EXPECTED, MODEL, SCRIPTS, WEATHER
from tests.gateways import run_gateway
from tests.swarms import run_swarm

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 9}, "kind": {"enum": ["wolf", "king"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=scripted.api, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def demo():
    with run_swarm(DEMO_FOLDER, ("0:6", "6:12")) as swarm, run_gateway(swarm) as gateway:
        with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as made:
            yield made


def ask(client: openai.OpenAI, *said: str | dict[str, Any], **options: Any) -> Any:
    messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 200, **options})


def called(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_calls_of_tools(client):
    (choice,) = ask(client, "weather?", tools=[WEATHER]).choices
    assert called(choice.message.tool_calls) == EXPECTED
    assert choice.message.content == "I shall look."
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_calls_of_tools_in_a_stream(client):
    text, calls, reasons = "", {}, []
    for chunk in ask(client, "weather?", tools=[WEATHER], stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            calls[call.index] = call
        reasons.append(choice.finish_reason)
    assert text.strip() == "I shall look."
    assert called([calls[index] for index in sorted(calls)]) == EXPECTED
    assert reasons[-1] == "tool_calls"


def test_the_answer_of_a_tool_goes_into_the_conversation(client):
    call = ask(client, "weather?", tools=[WEATHER]).choices[0].message
    answer = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "degrees: 12"}
    reply = ask(client, "weather?", call.model_dump(exclude_none=True), answer, tools=[WEATHER]).choices[0]
    assert reply.message.content == SCRIPTS["12"]
    assert reply.finish_reason == "stop"


def test_a_call_of_a_tool_that_was_not_offered_is_text(client):
    for word, options in [
        ("unknown?", {"tools": [WEATHER]}),
        ("weather?", {}),
        ("weather?", {"tools": [WEATHER], "tool_choice": "none"}),
    ]:
        (choice,) = ask(client, word, **options).choices
        assert choice.message.tool_calls is None
        assert choice.message.content == SCRIPTS[word]
        assert choice.finish_reason == "stop"


def test_a_single_call_is_the_end_of_the_answer(client):
    (choice,) = ask(client, "weather?", tools=[WEATHER], parallel_tool_calls=False).choices
    assert called(choice.message.tool_calls) == EXPECTED[:1]
    assert (choice.message.content, choice.finish_reason) == ("I shall look.", "tool_calls")


def test_a_call_can_be_forced(client):
    for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
        (reply,) = ask(client, "json?", tools=[WEATHER], tool_choice=choice, seed=3, max_tokens=400).choices
        ((name, arguments),) = called(reply.message.tool_calls)
        assert name == "weather"
        assert isinstance(arguments["city"], str)


def test_a_forced_call_that_is_cut_off_is_no_text(client):
    reply = ask(client, "json?", tools=[WEATHER], tool_choice="required", seed=3, max_tokens=8).choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "weather"
    assert (reply.message.content, reply.finish_reason) == (None, "length")


def test_json_that_the_model_would_write_anyway(client):
    reply = ask(client, "json?", response_format={"type": "json_object"}).choices[0]
    assert json.loads(reply.message.content) == {"answer": 42, "why": "because"}


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_knows_stories_alone_writes_what_the_schema_asks_for(demo, seed):
    wanted = {"type": "json_schema", "json_schema": {"name": "beast", "schema": SCHEMA, "strict": True}}
    reply = ask(demo, "Once upon a time", model="demo", response_format=wanted, seed=seed, max_tokens=300)
    found = json.loads(reply.choices[0].message.content)
    assert set(found) == {"size", "kind"}
    assert 1 <= found["size"] <= 9
    assert found["kind"] in ("wolf", "king")
    assert reply.choices[0].finish_reason == "stop"


def test_forms_that_cannot_be(client):
    for options, param in [
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
            "response_format",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "json?", **options)
        assert caught.value.param == param


def test_thoughts_are_apart_from_the_answer(client):
    (choice,) = ask(client, "think?", tools=[WEATHER]).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("It was asked.", "So it is.")
    thought = text = ""
    for chunk in ask(client, "think?", stream=True):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
    assert (thought, text) == ("It was asked.", "So it is.")


def test_a_chat_template_is_given_what_the_request_sets(client):
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    for options in ({"extra_body": quiet}, {"reasoning_effort": "none"}):
        (choice,) = ask(client, "think?", **options).choices
        assert choice.message.content == SCRIPTS["hmm,"]
    with pytest.raises(openai.BadRequestError, match="does not know 'mood'") as caught:
        ask(client, "think?", extra_body={"chat_template_kwargs": {"mood": "kind"}})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(openai.BadRequestError, match="chat template does not read it") as caught:
        ask(client, "think?", reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"


def test_what_is_not_known_is_refused_and_what_changes_nothing_is_not(client):
    harmless = {"user": "ann", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    said = ask(client, "12", **harmless, stream_options=None).choices[0].message
    again = ask(client, "12", said.model_dump(), "12", **harmless, extra_body={"prompt_cache_key": "k"})
    assert again.choices[0].message.content == said.content
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "12", extra_body={"min_length": 100})
    assert (caught.value.param, caught.value.code) == ("min_length", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "json?", response_format={"type": "json_object", "schema": SCHEMA})
    assert caught.value.param == "response_format"


def test_a_message_of_the_assistant_is_continued(client):
    begun = {"role": "assistant", "content": "hmm,"}
    (choice,) = ask(client, "Say", begun, extra_body={"continue_final_message": True}).choices
    assert choice.message.content == SCRIPTS["hmm,"]


def test_fields_of_other_servers_are_done(demo):
    def said(**extra: Any) -> Any:
        return ask(demo, "Once upon a time", model="demo", max_tokens=24, temperature=0, extra_body=extra).choices[0]

    plain = said()
    assert said(repetition_penalty=1.8).message.content != plain.message.content
    assert ask(
        demo, "Once upon a time", model="demo", max_tokens=24, temperature=2, extra_body={"min_p": 1.0}
    ).choices[0].message.content == plain.message.content  # fmt: skip
    assert said(guided_choice=["a wolf", "the wolf"]).message.content in ("a wolf", "the wolf")
    assert re.fullmatch("[0-9]{3}/x", said(structured_outputs={"regex": "[0-9]{3}/x"}).message.content)
    tokenizer = load_tokenizer(DEMO_FOLDER)
    token = tokenizer(plain.message.content)["input_ids"][4]
    stopped = said(stop_token_ids=[token])
    assert stopped.finish_reason == "stop"
    assert plain.message.content.startswith(stopped.message.content)
    assert len(stopped.message.content) < len(plain.message.content)
    long = demo.completions.create(
        model="demo", prompt="word " * 2000, max_tokens=2, extra_body={"truncate_prompt_tokens": 10}
    )
    assert long.usage.prompt_tokens == 10
