"""Conversations as tokens."""

from __future__ import annotations

import sys

import pytest

from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.chat_template import (
    TemplateOptions,
    conversation_text,
    conversation_tokens,
    template_text,
    unusable_variable,
)
from swarm.models.tokenizers.tokenizer import load_tokenizer

TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('the system speaks first') }}{%- endif -%}
[{{ message.role }}] {{ message.content }}
{% endfor -%}
{%- if tools %}tools: {{ tools | length }}
{% endif -%}
{%- if add_generation_prompt %}[assistant] {% endif -%}"""


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO_FOLDER)


def said(tokenizer, messages, tools=None, options=None) -> str:
    return tokenizer.decode(conversation_tokens(tokenizer, messages, tools, options))


def test_a_model_without_a_template_continues_the_texts(tokenizer):
    tokenizer.chat_template = None
    assert template_text(tokenizer) is None
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Once"},
        {"role": "user", "content": "upon"},
    ]
    assert said(tokenizer, messages) == "Once\n\nupon"


def test_the_demo_model_has_plays(tokenizer):
    function = {"name": "f", "parameters": {"type": "object"}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    prompt = said(tokenizer, messages, [{"type": "function", "function": function}])
    assert '{"name": "f", "parameters": {"type": "object"}}\n\nBe kind.\n\nUSER:\nHi\n\nASSISTANT:\n' in prompt
    assert prompt.endswith('{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n\nTOOL:\n3\n\nASSISTANT:\n')


def test_the_template_writes_the_conversation(tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert said(tokenizer, messages, [{}]) == "[system] Be kind.\n[user] Hi\ntools: 1\n[assistant] "


def test_what_a_template_refuses_is_told(tokenizer):
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ChatTemplateError, match="the system speaks first"):
        conversation_tokens(tokenizer, [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])


def test_a_template_cannot_reach_python(tokenizer):
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError):
        conversation_tokens(tokenizer, [{"role": "user", "content": "a"}])


@pytest.fixture
def _usual_depth():
    """Other tests of this process may have raised how deep Python may go."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("_usual_depth")
def test_what_is_nested_too_deeply_for_a_template_is_refused(tokenizer):
    tokenizer.chat_template = "{{ tools | tojson }}"
    deep: dict[str, object] = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with pytest.raises(ChatTemplateError, match="recursion"):
        conversation_tokens(tokenizer, [{"role": "user", "content": "a"}], [deep])


HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]


def test_the_last_message_may_be_continued(tokenizer):
    tokenizer.chat_template = TEMPLATE
    assert said(tokenizer, HELLO, options=TemplateOptions(continue_final=True)) == "[user] Hi\n[assistant] Well,"
    assert said(tokenizer, HELLO, options=TemplateOptions(opens_answer=False)).endswith("[assistant] Well,\n")
    tokenizer.chat_template = None
    assert said(tokenizer, HELLO, options=TemplateOptions(continue_final=True)) == "Hi\n\nWell,"


def test_the_template_reads_variables_of_the_request(tokenizer):
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is false %}no thoughts{% endif %}"
    options = TemplateOptions({"enable_thinking": False})
    assert said(tokenizer, HELLO, options=options).endswith("[assistant] no thoughts")


def test_variables_that_a_template_is_not_given(tokenizer):
    for name, value, problem in [
        ("chat_template", "{{ 7 }}", "not for requests to set"),
        ("tokenize", True, "not for requests to set"),
        ("messages", [], "not for requests to set"),
        ("self", 1, "not for requests to set"),
        ("mood", "kind", "does not know 'mood'; leave it out"),
        ("enable_thinking", True, "does not know 'enable_thinking'"),
    ]:
        for template in (TEMPLATE, None):
            tokenizer.chat_template = template
            assert problem in unusable_variable(tokenizer, {name: value})
            with pytest.raises(ChatTemplateError, match=problem):
                conversation_tokens(tokenizer, HELLO, options=TemplateOptions({name: value}))


def test_each_message_is_written_in_the_form_that_the_template_wants(tokenizer):
    """Templates of models that take images want texts, lists of parts, or both by role."""
    parts = [{"type": "image"}, {"type": "text", "text": "See"}]
    talk = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "So"},
    ]
    list_form = "{% for part in message.content %}{{ part.text or '#' }}{% endfor %}"
    text_form = "{% if message.content is string %}{{ message.content }}{% else %}" + list_form + "{% endif %}"
    by_role = "{% if message.role == 'assistant' %}{{ message.content + '!' }}{% else %}" + text_form + "{% endif %}"
    for form, written in ((list_form, "#See|Hi|So|"), (text_form, "#See|Hi|So|"), (by_role, "#See|Hi!|So|")):
        tokenizer.chat_template = "{% for message in messages %}" + form + "|{% endfor %}"
        assert conversation_text(tokenizer, talk, None, TemplateOptions()) == written


def test_the_template_of_a_model_with_images_may_be_in_a_file_of_its_own(tokenizer, tmp_path):
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert template_text(load_tokenizer(tmp_path)) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert template_text(load_tokenizer(tmp_path)) == "{{ messages[0].content }}"
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
