"""Tool calls in answers of all families, however the text is divided."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.generation.formats import tool_calls
from swarm.generation.formats.tool_calls import TABLE, ToolCall, ToolCallParser, tool_syntax

NAMES = frozenset({"weather", "add.numbers"})
ARGUMENTS = '{"city": "Zürich {x} \\" \\\\", "days": [1, {"n": 2}]}'
BY_FAMILY = {syntax.family: syntax for syntax in TABLE}
HERMES = BY_FAMILY["Hermes and Qwen"]
LLAMA = BY_FAMILY["Llama 3"]
MISTRAL = BY_FAMILY["Mistral, a list"]
DEEPSEEK = BY_FAMILY["DeepSeek V3 and R1"]


def parse(syntax, *pieces, names=NAMES):
    parser = ToolCallParser(syntax, names)
    content, calls = [], []
    for text, found in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content.append(text)
        calls += found
    return "".join(content), calls


def written(syntax, name="weather", arguments=ARGUMENTS):
    call = f'{{"name": "{name}", "{syntax.arguments}": {arguments}}}'
    return syntax.call_template.replace("{name}", name).replace("{arguments}", arguments).replace("{call}", call)


CALL = ToolCall("weather", ARGUMENTS)


def test_families_are_recognised_by_their_templates():
    for template, family in [
        ("... <tool_call>\n{...}\n</tool_call> ...", "Hermes and Qwen"),
        ("... <|python_tag|> ...", "Llama 3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "Llama 3"),
        ("... [TOOL_CALLS] [ ...", "Mistral, a list"),
        ("... [TOOL_CALLS]{{ name }}[ARGS] ...", "Mistral, names before arguments"),
        ("... <|tool_call|> ...", "Granite"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json", "DeepSeek V3 and R1"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "DeepSeek V3.1"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "Kimi K2"),
    ]:
        assert tool_syntax(template) is BY_FAMILY[family]


def test_other_templates_have_no_known_tool_syntax():
    for template in [
        "",
        "{{ messages }}",
        "<tool_call>\n<function=name>\n</tool_call>",
        "<tool_call>name\n<arg_key>k</tool_call>",
    ]:
        assert tool_syntax(template) is None


def test_every_family_is_read_as_it_is_written():
    for syntax in TABLE:
        assert parse(syntax, written(syntax)) == ("", [CALL])
        assert parse(syntax, "\n\n", written(syntax), "\n") == ("", [CALL])


def test_content_before_a_call_is_returned():
    for syntax in [s for s in TABLE if not s.bare]:
        assert parse(syntax, "Let me look. " + written(syntax)) == ("Let me look. ", [CALL])


TWO = [CALL, ToolCall("add.numbers", "{}")]
BOTH = f'{{"name": "weather", "arguments": {ARGUMENTS}}}', '{"name": "add.numbers", "arguments": {}}'


def test_several_calls():
    for syntax, text in [
        (HERMES, f"<tool_call>{BOTH[0]}</tool_call>\n<tool_call>\n{BOTH[1]}\n</tool_call>"),
        (HERMES, f"<tool_call>{BOTH[0]}\n{BOTH[1]}</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS] [{BOTH[0]}, {BOTH[1]}]"),
        (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}[TOOL_CALLS]add.numbers{{}}"),
        (LLAMA, "; ".join(BOTH).replace("arguments", "parameters")),
        (LLAMA, "<|python_tag|>" + "; ".join(BOTH).replace("arguments", "parameters") + "<|eom_id|>"),
        (BY_FAMILY["Granite"], f"<|tool_call|>[{BOTH[0]},{BOTH[1]}]"),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add.numbers\n```json\n"
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            BY_FAMILY["Kimi K2"],
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.add.numbers:1<|tool_call_argument_begin|>"
            "{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ]:
        assert parse(syntax, text) == ("", TWO)
        assert parse(syntax, *text) == ("", TWO)


def test_text_that_is_not_a_call_is_unchanged_content():
    for syntax, text in [
        (HERMES, "Hello <tool_cal"),
        (HERMES, "\n<tool_call>{}</tool_call>"),
        (LLAMA, "\n{"),
        (HERMES, '<tool_call>{"name": "weather"'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {1}}</tool_call> and more'),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>what? {"name": "weather", "arguments": {}}</tool_call>'),
        (HERMES, "<tool_call>" + "x" * 1000),
        (HERMES, '{"name": "weather", "arguments": {}}'),
        (LLAMA, 'Well, {"name": "weather", "parameters": {}}'),
        (LLAMA, "<|python_tag|>print(5)"),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]{}"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather {}}"[:30]),
    ]:
        assert parse(syntax, text) == (text, [])
        assert parse(syntax, *text) == (text, [])


def test_content_after_a_call_is_returned():
    assert parse(HERMES, written(HERMES), " Done.") == (" Done.", [CALL])


def test_a_call_after_something_that_is_not_a_call():
    text = "<tool_call>{}</tool_call>"
    assert parse(HERMES, text + written(HERMES)) == (text, [CALL])


def test_arguments_in_other_dress():
    for arguments, text in [('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ("{ }", "{ }")]:
        assert parse(HERMES, written(HERMES, arguments=arguments)) == ("", [ToolCall("weather", text)])


def test_calls_are_returned_when_complete_and_content_at_once():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed("Hi <b") == ("Hi <b", [])
    assert parser.feed("> <tool") == ("> ", [])
    assert parser.feed('_call>{"name": "weather", "arguments": {"a": "}') == ("", [])
    assert parser.feed('"}}') == ("", [ToolCall("weather", '{"a": "}"}')])
    assert parser.feed("\n</tool_call>") == ("", [])
    assert parser.finish() == ("", [])


def test_what_is_held_back_is_bounded():
    for text in ["{" * 300_000, '{"name": ' * 30_000, " " * 300_000, "<tool_call>{" * 20_000]:
        parser = ToolCallParser(HERMES, NAMES)
        told = parser.feed("<tool_call>" + text)[0]
        assert len(parser._held) <= tool_calls.MAX_CALL_CHARACTERS
        assert told + parser.finish()[0] == "<tool_call>" + text


def test_deep_nesting_is_content():
    text = '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "}"
    assert parse(HERMES, text) == (text, [])


FRAGMENTS = sorted(
    {mark for syntax in TABLE for mark in (*syntax.opens, *syntax.closes)}
    | {written(syntax) for syntax in TABLE}
    | {
        *BOTH,
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "Hi",
        "weather",
        "[ARGS]",
        "<",
        "<tool_",
        "<|tool_call",
    }
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=600)
@given(st.sampled_from(TABLE), TEXTS, st.data())
def test_how_the_text_is_cut_changes_nothing(syntax, text, data):
    whole = parse(syntax, text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    assert parse(syntax, *(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == whole
    assert parse(syntax, *text) == whole
    content, calls = whole
    assert all(call.name in NAMES and isinstance(json.loads(call.arguments), dict) for call in calls)
    if not calls:
        assert content == text
    ends_early = ToolCallParser(syntax, NAMES)
    assert whole[0].startswith(ends_early.feed(text)[0])  # nothing is taken back


@given(st.integers(-3, 3), st.integers(1, 5))
@example(0, 1)
def test_bounds_are_the_same_however_the_text_is_cut(more, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_calls, "MAX_CALL_CHARACTERS", 60)
        filler = "x" * (60 - len('<tool_call>{"name": "weather", "arguments": {"a": ""}}') + more)
        text = (
            f'<tool_call>{{"name": "weather", "arguments": {{"a": "{filler}"}}}}' + written(HERMES) + " " * (58 + more)
        )
        whole = parse(HERMES, text)
        assert parse(HERMES, *(text[at : at + piece] for at in range(0, len(text), piece))) == whole
        assert (whole[1][:1] == [ToolCall("weather", f'{{"a": "{filler}"}}')]) == (more <= 0)


def test_a_call_that_has_to_be_and_is_cut_off_is_a_call():
    """Cut anywhere: nothing is content, and the arguments are the beginning of the whole ones."""
    for syntax in TABLE:
        whole = written(syntax)
        for names in (NAMES, frozenset({"weather"})):
            for end in range(len(whole) + 1):
                parser = ToolCallParser(syntax, names, must_call=True)
                first, rest = parser.feed(whole[:end]), parser.finish()
                assert first[0] + rest[0] == ""
                calls = first[1] + rest[1]
                assert len(calls) == 1 or (not calls and (len(names) > 1 or end == 0))
                assert all(
                    call.name == "weather" and ARGUMENTS.startswith(call.arguments.rstrip("}")) for call in calls
                )
                assert parser.is_cut is not bool(first[1])
            assert calls == [CALL]
