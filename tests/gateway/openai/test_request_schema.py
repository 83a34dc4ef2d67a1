"""Valid and invalid request bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.request_schema import parse_chat_request, parse_completion_request

USER = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": USER, **fields})


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": "hello", **fields})


def refused(read: Any, body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"max_tokens": -1}, "Expected `int` >= 1, at `max_tokens`", "max_tokens"),
        ({"max_tokens": 0}, "Expected `int` >= 1, at `max_tokens`", "max_tokens"),
        ({"max_tokens": "ten"}, "Expected `int | null`, got `str`, at `max_tokens`", "max_tokens"),
        ({"max_tokens": 1.5}, "Expected `int | null`, got `float`, at `max_tokens`", "max_tokens"),
        ({"temperature": 2.5}, "Expected `float` <= 2.0, at `temperature`", "temperature"),
        ({"temperature": -0.1}, "Expected `float` >= 0.0, at `temperature`", "temperature"),
        ({"top_p": 0}, "Expected `float` > 0.0, at `top_p`", "top_p"),
        ({"n": 9}, "Expected `int` <= 8, at `n`", "n"),
        ({"stop": ""}, "Expected `str` of length >= 1, at `stop`", "stop"),
        ({"presence_penalty": 3}, "Expected `float` <= 2.0, at `presence_penalty`", "presence_penalty"),
        ({"logit_bias": {"1": 101}}, "Expected `float` <= 100.0, at `logit_bias[...]`", "logit_bias[...]"),
        ({"model": ""}, "Expected `str` of length >= 1, at `model`", "model"),
        ({"model": None}, "Expected `str`, got `null`, at `model`", "model"),
        ({"messages": []}, "Expected `array` of length >= 1, at `messages`", "messages"),
        ({"messages": "hi"}, "Expected `array`, got `str`, at `messages`", "messages"),
        (
            {"messages": [{"role": "boss", "content": ""}]},
            "Invalid enum value 'boss', at `messages[0].role`",
            "messages[0].role",
        ),
        ({"messages": [{"content": "x"}]}, "Object missing required field `role`, at `messages[0]`", "messages[0]"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "Expected `int` <= 20, at `top_logprobs`", "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"functions": []}, "functions is not supported; use tools and tool_choice", "functions"),
        ({"audio": {}}, "audio is not supported", "audio"),
        ({"seed": 2**64}, "Expected `int` <= 9223372036854775807, at `seed`", "seed"),
    ],
)
def test_wrong_fields_are_named(fields, message, param):
    failure = refused(parse_chat_request, chat(**fields))
    assert (str(failure), failure.param) == (message, param)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": "m" "x": 1}', b"[" * 100_000])
def test_invalid_json(body):
    for read in (parse_chat_request, parse_completion_request):
        failure = refused(read, body)
        assert "JSON" in str(failure) or "Expected `object`" in str(failure)


def test_unknown_fields_are_ignored():
    asked = parse_chat_request(
        chat(user="ann", metadata={"a": 1}, store=True, service_tier="auto", functions=None, temperature=1)
    )
    assert (asked.temperature, asked.stops, asked.include_usage) == (1.0, [], False)


def test_text_parts_are_joined_and_images_rejected():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat_request(chat(messages=[{"role": "user", "content": parts}])).messages[0].text() == "ab"
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    message = parse_chat_request(chat(messages=[{"role": "user", "content": picture}])).messages[0]
    with pytest.raises(BadRequest, match="'image_url' is not supported"):
        message.text()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, expected):
    assert parse_completion_request(completion(prompt=prompt)).prompts() == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", 1], [[-1]], ["a"] * 9, [True, False, None]])
def test_invalid_prompts(prompt):
    with pytest.raises(BadRequest, match="prompt must be a text"):
        parse_completion_request(completion(prompt=prompt)).prompts()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_unsupported_completion_options_are_rejected(fields, param):
    assert refused(parse_completion_request, completion(**fields)).param == param
