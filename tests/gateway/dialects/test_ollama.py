"""Ollama's own client against a gateway of a real swarm."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import httpx
import msgspec
import ollama
import pytest

from swarm.gateway.dialects.ollama import OllamaDialect
from swarm.gateway.openai.api_errors import ServiceUnavailable
from tests.gateway.scripts import EXPECTED, MODEL, SCRIPTS, WEATHER


@pytest.fixture(scope="module")
def client(scripted):
    with closing(ollama.Client(host=scripted.url)) as made:
        yield made


def ask(client: ollama.Client, said: str, **more: Any) -> Any:
    return client.chat(**{"model": MODEL, "messages": [{"role": "user", "content": said}], **more})


def streamed(client: ollama.Client, said: str, **more: Any) -> Any:
    """The last piece, with the text and calls of all."""
    pieces = list(ask(client, said, stream=True, **more))
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    last.message.content = "".join(piece.message.content for piece in pieces)
    last.message.thinking = "".join(piece.message.thinking or "" for piece in pieces)
    last.message.tool_calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    return last


@pytest.mark.parametrize("answer", [ask, streamed])
def test_conversations(client, answer):
    said = answer(client, "think?", think=True)
    assert (said.message.thinking, said.message.content) == ("It was asked.", "So it is.")
    assert (said.done_reason, said.model) == ("stop", MODEL)
    assert said.total_duration >= said.prompt_eval_duration + said.eval_duration > 0
    assert said.eval_count > 0
    called = answer(client, "weather?", tools=[WEATHER])
    assert [(call.function.name, call.function.arguments) for call in called.message.tool_calls] == EXPECTED
    cut = answer(client, "12", options={"num_predict": 2, "num_ctx": 4096, "temperature": 0.5})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)


def test_the_answer_of_a_tool_goes_into_the_conversation(client):
    calls = ask(client, "weather?", tools=[WEATHER]).message
    more = [{"role": "user", "content": "weather?"}, calls, {"role": "tool", "tool_name": "weather", "content": "12"}]
    assert client.chat(model=MODEL, messages=more, tools=[WEATHER]).message.content == "It is 12 degrees there."


def test_thinking_can_be_turned_off(client):
    said = ask(client, "think?", think=False).message
    assert (said.content, said.thinking) == (SCRIPTS["hmm,"], None)


def test_prompts(client):
    assert client.generate(model=MODEL, prompt="12").response == SCRIPTS["12"]
    raw = client.generate(model=MODEL, prompt="hmm,", raw=True, options={"stop": ["so"]}, logprobs=True, top_logprobs=2)
    assert raw.response == " and once more, it is "
    assert all(len(one.top_logprobs) == 2 for one in raw.logprobs)
    pieces = client.generate(model=f"{MODEL}:latest", prompt="12", system="Be kind.", stream=True)
    assert "".join(piece.response for piece in pieces) == SCRIPTS["12"]
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL).done_reason == "load"


def test_answers_have_a_form_that_is_asked_for(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    said = ask(client, "json?", format=schema, options={"num_predict": 100}).message.content
    assert msgspec.json.decode(said)["n"] in (1, 2)
    assert msgspec.json.decode(ask(client, "json?", format="json").message.content)["answer"] == 42


def test_models(client, scripted):
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert (listed.model, running.model, listed.details.family) == (MODEL, MODEL, "llama")
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == running.context_length > 0
    assert httpx.get(f"{scripted.url}/api/version", timeout=60).json()["version"]


def test_errors_are_in_ollamas_form(client):
    for refused, status, reason in [
        ({"model": "nobody"}, 404, "nobody"),
        ({"options": {"mood": 1}}, 400, "options.mood is not supported"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 60_000}]}, 400, "maximum context length"),
    ]:
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match=reason) as caught:
                list(ask(client, "12", stream=stream, **refused))
            assert caught.value.status_code in (status, -1 if stream else status)
    assert OllamaDialect().error(ServiceUnavailable("gone", code="x")) == b'{"error":"gone"}\n'
    blank = OllamaDialect.keep_alive + b'{"done":true}'
    assert msgspec.json.decode(blank) == {"done": True}  # what keeps a stream alive is part of no object
