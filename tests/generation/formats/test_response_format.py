"""Response formats and forced tool calls, with a real tokenizer and random scores."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import swarm.models
from swarm.gateway.openai.request_conversion import tool_options
from swarm.gateway.openai.request_schema import ChatRequest, parse_chat_request
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.response_format import GrammarCompiler, regex_grammar
from swarm.generation.formats.tool_calls import TABLE, ToolCallParser
from tests.scripted import make_scripted

DEMO = Path(swarm.models.__file__).parent / "demo"
PADDED = 10
"""Scores that do not belong to a token, as in many heads."""

ENOUGH = 3000
HERMES = next(syntax for syntax in TABLE if syntax.family == "Hermes and Qwen")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDED)


def request(**fields) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return parse_chat_request(json.dumps(body).encode())


def schema_request(schema, strict=True) -> ChatRequest:
    return request(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    )


def constrain(grammars: GrammarCompiler, asked: ChatRequest, syntax):
    return grammars.constraint(asked.form(), tool_options(asked), syntax)


def sample(grammars, tokenizer, asked, syntax=None, seed=0) -> str:
    """An answer from random scores that favour closing characters, since texts would be endless otherwise."""
    constraint = constrain(grammars, asked, syntax)
    random = torch.Generator().manual_seed(seed)
    closing = [n for n, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if token in '"}],:']
    tokens = []
    while len(tokens) < ENOUGH:
        scores_V = torch.randn(len(tokenizer) + PADDED, generator=random)
        scores_V[closing] += 6.0
        masked_V = constraint.mask(tokens, scores_V)
        allowed_V = masked_V > float("-inf")
        assert allowed_V.any()
        assert torch.equal(masked_V[allowed_V], scores_V[allowed_V])
        assert not allowed_V[len(tokenizer) :].any()
        token = int(torch.multinomial(torch.softmax(masked_V, -1), 1, generator=random))
        if constraint.is_complete:  # then only the end may follow
            assert allowed_V.nonzero().flatten().tolist() == [tokenizer.eos_token_id]
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(tokens)}")


def allowed(constraint, tokens, tokenizer) -> list[int]:
    """What may follow the tokens."""
    return (constraint.mask(tokens, torch.zeros(len(tokenizer))) == 0).nonzero().flatten().tolist()


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    tags: list[str]
    friend: Person | None = None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": (PERSON, lambda value: msgspec.convert(value, Person) and 0 <= value["age"] <= 150),
    "enum": ({"enum": ["one", 2, None]}, lambda value: value in ("one", 2, None)),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2,4}$"}, lambda value: set(value) <= set("abc")),
    "number": ({"type": "number", "minimum": 1, "maximum": 2}, lambda value: 1 <= value <= 2),
    "definitions": (
        {"$defs": {"n": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 4},
        lambda value: all(isinstance(item, bool) for item in value),
    ),
}


def test_whatever_is_sampled_fits_the_schema(grammars, tokenizer):
    for name in SCHEMAS:
        for seed in range(3):
            schema, fits = SCHEMAS[name]
            assert fits(json.loads(sample(grammars, tokenizer, schema_request(schema), seed=seed))) in (True, None)


def test_json_object(grammars, tokenizer):
    for seed in range(3):
        asked = request(response_format={"type": "json_object"})
        assert isinstance(json.loads(sample(grammars, tokenizer, asked, seed=seed)), dict)


def test_text_is_not_constrained(grammars):
    for fields in [{}, {"response_format": None}, {"response_format": {"type": "text"}}]:
        assert constrain(grammars, request(**fields), None) is None


def test_what_is_not_known_is_ignored_unless_strict(grammars):
    schema = {"type": "array", "uniqueItems": True}
    assert constrain(grammars, schema_request(schema, strict=False), None) is not None
    with pytest.raises(InvalidGenerationRequest, match=r'Unimplemented keys: \["uniqueItems"\]'):
        constrain(grammars, schema_request(schema), None)


def deep(levels):
    schema: dict = {}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def test_unknown_formats_are_refused(grammars):
    for response_format, says in [
        ({"type": "yaml"}, "response_format: Invalid enum value 'yaml'"),
        ({"type": "json_schema"}, "needs json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "needs json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "Expected `object | null`, got `array`"),
        ({}, "missing required field `type`"),
    ]:
        with pytest.raises(InvalidGenerationRequest) as raised:
            constrain(grammars, request(response_format=response_format), None)
        assert says in str(raised.value)
        assert raised.value.parameter == "response_format"


def test_schemas_that_cannot_be_used_are_refused(grammars):
    for schema, says in [
        ({"type": "banana"}, "Invalid type: banana"),
        ({"$ref": "http://example.org/schema"}, "does not fetch resources"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch resources"),
        ({"$ref": "#"}, "no text fulfils it"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "(?=x)"}, "regex parse error"),
        ({"enum": ["x" * 70_000]}, "the schemas are longer than 64 KiB"),
        (deep(200), "recursion limit"),
        ({"allOf": [{"type": "string", "pattern": f".*a.*{n}"} for n in range(40)]}, "it is too complex"),
    ]:
        with pytest.raises(InvalidGenerationRequest) as raised:
            constrain(grammars, schema_request(schema), None)
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "$defs": {"city": {"enum": ["Bern", "Zürich"]}},
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}}


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_a_forced_call_is_one_that_can_be_read(grammars, tokenizer):
    for syntax, choice in [*((syntax, "required") for syntax in TABLE), (HERMES, NAMED)]:
        asked = request(tools=[WEATHER, CLOCK], tool_choice=choice)
        for seed in range(2):
            text = sample(grammars, tokenizer, asked, syntax, seed)
            parser = ToolCallParser(syntax, frozenset({"weather", "clock"}))
            (before, calls), (behind, more) = parser.feed(text), parser.finish()
            assert (before, behind, more) == ("", "", [])
            (call,) = calls
            arguments = json.loads(call.arguments)
            assert arguments.get("city") in ("Bern", "Zürich") if call.name == "weather" else arguments == {}
            assert call.name == "weather" or choice == "required"


def test_marks_that_are_tokens_are_written_as_these(tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    first, last = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    constraint = constrain(
        GrammarCompiler(tokenizer, len(tokenizer)), request(tools=[CLOCK], tool_choice="required"), HERMES
    )
    assert allowed(constraint, [], tokenizer) == [first]
    call = tokenizer.encode('\n{"name": "clock", "arguments": {}}\n')
    assert allowed(constraint, [first, *call], tokenizer) == [last]
    assert allowed(constraint, [first, *call, last], tokenizer) == [tokenizer.eos_token_id]
    assert constraint.is_complete


def test_with_tools_an_answer_of_a_form_may_be_a_call_too(grammars, tokenizer):
    schema = {"const": 7}
    asked = request(
        tools=[CLOCK], response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    )
    texts = {sample(grammars, tokenizer, asked, HERMES, seed) for seed in range(12)}
    assert "7" in texts
    assert any(text.startswith("<tool_call>") for text in texts)


def test_calls_that_cannot_be_forced(grammars):
    for tools, choice, syntax, says in [
        (
            [WEATHER],
            {"type": "function", "function": {"name": "other"}},
            HERMES,
            "names 'other', which is not in tools",
        ),
        ([WEATHER], "required", None, "cannot be forced to call a tool"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "required",
            HERMES,
            "parameters of f are not an object",
        ),
    ]:
        with pytest.raises(InvalidGenerationRequest, match=says):
            constrain(grammars, request(tools=tools, tool_choice=choice), syntax)


def test_a_token_that_may_not_come_can_be_taken_back(grammars, tokenizer):
    constraint = constrain(grammars, request(response_format={"type": "json_object"}), None)
    good = tokenizer.encode('{"a": ')
    before = allowed(constraint, good, tokenizer)
    for _ in range(2):
        with pytest.raises(InvalidGenerationRequest):
            allowed(constraint, [*good, *tokenizer.encode("x")], tokenizer)
        assert allowed(constraint, good, tokenizer) == before


def test_other_ends_than_the_tokenizers(tokenizer):
    ends = [5, 7]
    constraint = constrain(GrammarCompiler(tokenizer, len(tokenizer), ends), schema_request({"const": 1}), None)
    assert allowed(constraint, tokenizer.encode("1"), tokenizer) == ends


def test_a_tokenizer_without_a_description_is_refused():
    slow = SimpleNamespace(eos_token_id=0)
    with pytest.raises(InvalidGenerationRequest, match="tokenizer does not support response formats"):
        constrain(GrammarCompiler(slow, 10), request(response_format={"type": "json_object"}), None)


def test_answers_at_the_same_time_do_not_disturb_each_other(tokenizer):
    grammars = GrammarCompiler(tokenizer, len(tokenizer) + PADDED)
    asked = schema_request(PERSON)
    texts: dict[int, str] = {}

    def write(seed):
        texts[seed] = sample(grammars, tokenizer, asked, seed=seed)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: sample(grammars, tokenizer, asked, seed=seed) for seed in range(4)}


def test_a_scripted_model_can_be_held_to_a_form(tmp_path):
    """Its tokens end in the middle of characters."""
    tokenizer = AutoTokenizer.from_pretrained(make_scripted(tmp_path, {"hello": '{"name": "Zoë ☕", "age": 5}'}))
    constraint = constrain(
        GrammarCompiler(tokenizer, len(tokenizer)), request(response_format={"type": "json_object"}), None
    )
    pieces = [n for n in range(len(tokenizer)) if n > 255 and n < tokenizer.eos_token_id]
    for place, token in enumerate(pieces):
        assert token in allowed(constraint, pieces[:place], tokenizer)
    assert allowed(constraint, pieces, tokenizer) == [tokenizer.eos_token_id]


@given(moves=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=12))
def test_what_is_allowed_depends_on_the_tokens_alone(grammars, tokenizer, moves):
    """Guesses that are taken back, also of tokens that end an answer and of the end itself."""
    asked = schema_request({"type": "object", "properties": {"size": {"enum": [1, 12, 123]}}, "required": ["size"]})
    texts = [tokenizer.encode('{"size": 123}'), tokenizer.encode('{ "size":12 }'), tokenizer.encode('{"size": 1}')]
    texts = [[*text, tokenizer.eos_token_id, *tokenizer.encode(" and")] for text in texts]
    reused = constrain(grammars, asked, None)
    for length, text in moves:
        tokens = texts[text % len(texts)][:length]
        fresh = constrain(grammars, asked, None)
        assert allowed(reused, tokens, tokenizer) == allowed(fresh, tokens, tokenizer)
        assert reused.is_complete == fresh.is_complete


SEVERAL_LINES = "a\n?/b"


def test_texts_of_a_regular_expression(grammars, tokenizer):
    for field in ["guided_regex", "structured_outputs"]:
        for pattern in [
            "[0-9]{3}-[0-9]{4}",
            "[a-c]+/[a-c]+",
            r"a\/b",
            SEVERAL_LINES,
            r'"x" \| y\\',
            "(yes|no)(, (yes|no)){2}",
            "/",
            r"\n/\r",
            "é+|ß",
        ]:
            asked = request(**{field: pattern if field == "guided_regex" else {"regex": pattern}})
            for seed in range(3):
                assert re.fullmatch(pattern, sample(grammars, tokenizer, asked, seed=seed))


@given(st.text(alphabet='/\\ab\n[]"|', min_size=1, max_size=8))
def test_a_regular_expression_stays_one_in_a_grammar(pattern):
    """Whatever is in it, it neither ends before its end nor becomes something else of the grammar."""
    try:
        written = regex_grammar(pattern, "guided_regex")
    except InvalidGenerationRequest:
        return
    inner = re.sub(r"\\.", "", written[1:-1])
    assert "/" not in inner
    assert "\n" not in written


def test_one_of_several_texts(grammars, tokenizer):
    for fields in [{"guided_choice": ["yes", "no", 'a "word"\n']}, {"structured_outputs": {"choice": ["x"]}}]:
        choice = fields.get("guided_choice") or fields["structured_outputs"]["choice"]
        asked = request(**fields)
        assert {sample(grammars, tokenizer, asked, seed=seed) for seed in range(20)} == set(choice)


def test_the_schemas_of_other_servers_fields(grammars, tokenizer):
    for schema in [{"type": "integer", "minimum": 7, "maximum": 7}, '{"const": 7}']:
        for fields in ({"guided_json": schema}, {"structured_outputs": {"json": schema, "regex": None}}):
            assert sample(grammars, tokenizer, request(**fields)) == "7"


def test_forms_that_cannot_be_are_named_by_their_field(grammars):
    for fields, param in [
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"guided_json": {"type": 7}}, "guided_json"),
        ({"guided_choice": ["x" * 40_000, "y" * 40_000]}, "guided_choice"),
    ]:
        with pytest.raises(InvalidGenerationRequest) as caught:
            constrain(grammars, request(**fields), None)
        assert caught.value.parameter == param


GAP = re.compile(r"( |\n( {0,16}|\t{0,8}))?")


def test_a_gap_is_one_space_or_a_line_break_and_its_indent(grammars, tokenizer):
    for form in [{"type": "json_object"}, None]:
        asked = request(response_format=form) if form else schema_request(PERSON)
        for seed in range(5):
            text = sample(grammars, tokenizer, asked, seed=seed)
            outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
            assert all(GAP.fullmatch(gap) for gap in re.findall(r"\s+", outside))


def test_json_may_be_written_in_the_usual_ways(grammars, tokenizer):
    for indent in [None, 2, 4, "\t"]:
        written = json.dumps({"name": "Ann", "age": 7, "tags": ["a", "b"]}, indent=indent)
        constraint = constrain(grammars, schema_request(PERSON), None)
        tokens = tokenizer(written)["input_ids"]
        for place, token in enumerate(tokens):
            assert token in allowed(constraint, tokens[:place], tokenizer)
