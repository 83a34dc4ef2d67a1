"""Valid and invalid request bodies."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.refused_fields import CHAT
from swarm.gateway.openai.request_conversion import template_message
from swarm.gateway.openai.request_schema import decode_request, parse_chat_request, parse_completion_request
from swarm.gateway.tokenizer_endpoints import DetokenizeRequest, parse_tokenize_request
from swarm.generation.formats.response_format import AnswerForm

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


def test_wrong_fields_are_named():
    for fields, message, param in [
        ({"max_tokens": -2}, "Expected `int` >= -1, at `max_tokens`", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens may not be 0; use 1 or more, or -1 for as many as fit", "max_tokens"),
        ({"max_tokens": "ten"}, "Expected `int | null`, got `str`, at `max_tokens`", "max_tokens"),
        ({"max_tokens": 1.5}, "Expected `int | null`, got `float`, at `max_tokens`", "max_tokens"),
        ({"temperature": 2.5}, "Expected `float` <= 2.0, at `temperature`", "temperature"),
        ({"n": 9}, "Expected `int` <= 8, at `n`", "n"),
        ({"logit_bias": {"1": 101}}, "Expected `float` <= 100.0, at `logit_bias[...]`", "logit_bias[...]"),
        ({"model": None}, "Expected `str`, got `null`, at `model`", "model"),
        ({"messages": []}, "Expected `array` of length >= 1, at `messages`", "messages"),
        (
            {"messages": [{"role": "boss", "content": ""}]},
            "Invalid enum value 'boss', at `messages[0].role`",
            "messages[0].role",
        ),
        ({"messages": [{"content": "x"}]}, "Object missing required field `role`, at `messages[0]`", "messages[0]"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "Expected `int` <= 20, at `top_logprobs`", "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice of type allowed_tools needs allowed_tools, at `tool_choice`",
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}]}, "functions is not supported; use tools and tool_choice", "functions"),
        (
            {"continue_final_message": True},
            "continue_final_message continues a message of the assistant, and the last one is of another role",
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"a b": 1}}, None, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": dict.fromkeys((f"v{n}" for n in range(33)), 1)},
            "chat_template_kwargs may have 32 names at most",
            "chat_template_kwargs",
        ),
        ({"stop_token_ids": [-1]}, "Expected `int` >= 0, at `stop_token_ids[0]`", "stop_token_ids[0]"),
        (
            {"structured_outputs": {"xml": "<a/>"}},
            "structured_outputs.xml is not supported; leave it out",
            "structured_outputs.xml",
        ),
    ]:
        failure = refused(parse_chat_request, chat(**fields))
        assert failure.param == param
        assert message is None or str(failure) == message


def test_invalid_json():
    for body in [b"", b"{", b"\xff\xfe", b'{"model": "m" "x": 1}', b"[" * 100_000]:
        for read in (parse_chat_request, parse_completion_request):
            failure = refused(read, body)
            assert "JSON" in str(failure) or "Expected `object`" in str(failure)


def test_only_fields_that_change_no_answer_are_ignored():
    harmless = {"user": "ann", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    asked = parse_chat_request(chat(**harmless, functions=None, unknown=None, stream_options={"include_usage": True}))
    assert (asked.temperature, asked.stops, asked.include_usage) == (None, [], True)
    assert parse_completion_request(completion(**harmless, unknown=None)).prompt == "hello"
    assert parse_tokenize_request(chat(**harmless))
    for read, body in (
        (parse_chat_request, chat(unknown=0)),
        (parse_completion_request, completion(unknown=False)),
        (parse_tokenize_request, chat(unknown=[])),
        (parse_tokenize_request, completion(unknown={})),
        (partial(decode_request, DetokenizeRequest), b'{"tokens": [1], "unknown": ""}'),
    ):
        failure = refused(read, body)
        assert str(failure) == "unknown is not supported; leave it out"
        assert (failure.param, failure.code) == ("unknown", "unsupported_parameter")
    assert str(refused(parse_chat_request, chat(**{"x" * 10**6: 1}))).startswith(f"{'x' * 64} is not")


def test_messages_that_clients_send_back():
    thought = {
        "reasoning": "so",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": {},
    }
    call = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"provider_specific_fields": None, "thinking_blocks": [], "function_call": None, "images": None}
    message = {"role": "assistant", "content": None, "tool_calls": [call], **thought, **other}
    (read,) = parse_chat_request(chat(messages=[message])).messages
    assert template_message(read)["reasoning_content"] == "so"
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    no = {"type": "refusal", "refusal": "no"}
    (read,) = parse_chat_request(chat(messages=[{"role": "assistant", "content": [part, no]}])).messages
    assert read.template_content() == "ano"


def test_unknown_fields_inside_others_are_refused():
    for fields, param in [
        ({"messages": [{**USER[0], "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{**USER[0], "images": ["aaaa"]}]}, "messages[0].images"),
        ({"messages": [{**USER[0], "audio": {"id": "1"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "de"}]}]},
            "messages[0].content[0].lang",
        ),
        ({"stream_options": {"every": 2}}, "stream_options.every"),
        ({"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]}, "tools[0].function.returns"),
        ({"structured_outputs": {"json": {}, "strict": True}}, "structured_outputs.strict"),
        ({"early_exit": {"beams": 1}}, "early_exit.beams"),
    ]:
        assert refused(parse_chat_request, chat(**fields)).param == param


def test_half_of_a_surrogate_pair_is_no_text():
    for half in [rb"\ud800", rb"\udc00.", b"\xed\xa0\x80"]:
        for field in ["stop", "suffix", "user", "unknown"]:
            body = completion().replace(b"hello", b'hello", "' + field.encode() + b'": "' + half)
            if field != "user":
                refused(parse_completion_request, body)
            refused(parse_completion_request, body.replace(b"hello", half))


def test_text_parts_are_joined_if_no_image_is_among_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        parse_chat_request(chat(messages=[{"role": "user", "content": parts}])).messages[0].template_content() == "ab"
    )
    parts[1] = {"type": "image_url", "image_url": {"url": "data:,"}}
    message = parse_chat_request(chat(messages=[{"role": "user", "content": parts}])).messages[0]
    assert message.template_content() == [{"type": "text", "text": "a"}, {"type": "image", "url": "data:,"}]
    parts[1] = {"type": "input_audio", "input_audio": {}}
    message = parse_chat_request(chat(messages=[{"role": "user", "content": parts}])).messages[0]
    with pytest.raises(BadRequest, match="'input_audio' is not supported; send text and image_url"):
        message.template_content()


def test_prompts():
    for prompt, expected in [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ]:
        assert parse_completion_request(completion(prompt=prompt)).prompts() == expected


def test_invalid_prompts():
    for prompt in [[], [[]], [1, "a"], ["a", 1], [[-1]], ["a"] * 257, [True, False, None]]:
        with pytest.raises(BadRequest, match="prompt must be a text"):
            parse_completion_request(completion(prompt=prompt)).prompts()


def test_unsupported_completion_options_are_rejected():
    for fields, param in [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": USER}, "messages"),
    ]:
        assert refused(parse_completion_request, completion(**fields)).param == param


def test_fields_that_would_change_the_answer_are_refused():
    for field in [*CHAT, "truncate_prompt_tokens"]:
        strange = 0 if field == "truncate_prompt_tokens" else {"strange": [1] * 30}
        failure = refused(parse_chat_request, chat(**{field: strange}))
        assert field in str(failure)
        if field in CHAT:
            assert (failure.param, failure.code) == (field, "unsupported_parameter")
            for neutral in (None, *CHAT[field][0]):
                parse_chat_request(chat(**{field: neutral}))


def test_a_field_that_one_endpoint_has_is_refused_by_the_other():
    assert parse_completion_request(completion(echo=True)).echo
    assert str(refused(parse_chat_request, chat(echo=True))) == "echo is not supported; use /v1/completions"
    assert refused(parse_completion_request, completion(add_special_tokens=False)).param == "add_special_tokens"


def test_a_completion_may_have_no_new_token():
    assert parse_completion_request(completion(max_tokens=0, echo=True, logprobs=1)).max_tokens == 0


def test_forms_of_an_answer():
    assert parse_chat_request(chat(response_format={"type": "text"})).form() is None
    assert parse_completion_request(completion(guided_regex="a+")).form() == AnswerForm(
        {"type": "regex", "regex": "a+"}, "guided_regex"
    )
    both = parse_chat_request(chat(response_format={"type": "json_object"}, structured_outputs={"choice": ["a"]}))
    for asked, param in (
        (both, "structured_outputs.choice"),
        (parse_chat_request(chat(structured_outputs={"grammar": "x"})), "structured_outputs.grammar"),
        (parse_chat_request(chat(guided_json="{")), "guided_json"),
    ):
        with pytest.raises(BadRequest) as caught:
            asked.form()
        assert caught.value.param == param


def test_values_that_switch_something_off():
    asked = parse_chat_request(
        chat(top_k=-1, top_p=0, max_tokens=-1, stop="", functions=[], function_call="none", top_logprobs=0)
    )
    assert (asked.top_k, asked.top_p, asked.max_tokens, asked.stops) == (-1, 0.0, -1, [])
    assert parse_chat_request(chat(stop=["", "END"])).stops == ["END"]


@given(st.integers(1, 2**31), st.integers(1, 15))
def test_whole_numbers_may_have_a_fraction_of_zero(number, zeros):
    body = chat(temperature=1.0, seed=3).replace(b'"seed":3', f'"max_tokens":{number}.{"0" * zeros}'.encode())
    assert parse_chat_request(body).max_tokens == number


def test_other_numbers_are_no_whole_ones():
    for number in ["1.5", "1e1", "16.00000000000000001", '"16"', "1e400"]:
        refused(parse_chat_request, chat(seed=3).replace(b'"seed":3', f'"max_tokens":{number}'.encode()))
