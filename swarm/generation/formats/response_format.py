"""Answers of a requested form: any JSON object, JSON of a schema, or a tool call.

A grammar determines before each token which ones may follow, so that any text that is sampled has the form. llguidance
compiles the schema and computes the masks (some 0.1 ms a token). It downloads nothing, and its time and memory are
bounded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.grammar_check import PARSER_LIMITS, grammar_error
from swarm.generation.formats.tool_calls import ToolFunction, ToolOptions, ToolSyntax

MAX_SCHEMA_CHARACTERS = 1 << 16
"""Of all schemas of a request together."""

MAX_CACHED_GRAMMARS = 32
"""Compiled grammars that are kept: many requests bring the same schema."""

MAX_ERROR_CHARACTERS = 300

START_RULE = "start: "

UNSATISFIABLE = ("NoExtension", "NoExtensionBias")
"""llguidance's reasons for stopping before the first token: no text has this form."""

WHITE_SPACE = r"(\x20|\x0A(\x20{0,16}|\x09{0,8}))?"
"""White space between the parts of JSON: one space, or a line break and its indent. Small models would go on and on."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The value of `json_schema` in OpenAI's `response_format`."""

    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None  # is not for the grammar


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`, with two forms more: a regular expression, and one of several texts."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice"]
    json_schema: JsonSchemaFormat | None = None
    regex: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)] | None = None


@dataclass(frozen=True)
class AnswerForm:
    """The form that a request asks for.

    Attributes:
        value: as `ResponseFormat`.
        parameter: the request's parameter that asks for it, for error messages.
    """

    value: Mapping[str, Any]
    parameter: str = "response_format"


class GrammarConstraint:
    """Keeps one answer to a grammar. For one sequence, in one thread at a time.

    Args:
        start: a matcher at the beginning of the answer; stays there.
        parameter: the request's parameter that asked for it, for error messages.
    """

    def __init__(self, start: LLMatcher, parameter: str) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._parameter = parameter
        self._tokens: list[int] = []
        """Those behind which the matcher is."""

    def mask(self, tokens: Sequence[int], scores_V: torch.Tensor) -> torch.Tensor:
        """The scores `[vocabulary]`, -inf where a token is not allowed. A complete answer may only end.

        Args:
            tokens: of the answer so far. They need not continue those of the call before.

        Raises:
            InvalidGenerationRequest: the schema turns out to be too complex, or does not allow the tokens. Other
                tokens may be tried.
        """
        self._go_behind(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._raise_error()
        allowed = np.unpackbits(bits, count=min(len(bits) * 8, len(scores_V)), bitorder="little").astype(bool)
        allowed_V = torch.zeros(len(scores_V), dtype=torch.bool)
        allowed_V[: len(allowed)] = torch.from_numpy(allowed)
        return scores_V.masked_fill(~allowed_V.to(scores_V.device), float("-inf"))

    def _go_behind(self, tokens: Sequence[int]) -> None:
        """Put the matcher behind `tokens`: back to where they differ from its own, and on from there."""
        same = next(
            (place for place, (ours, given) in enumerate(zip(self._tokens, tokens, strict=False)) if ours != given),
            min(len(self._tokens), len(tokens)),
        )
        if same < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - same)
            self._raise_error()
            del self._tokens[same:]
        for token in tokens[same:]:
            if self.is_complete:
                break
            self._matcher.consume_token(token)
            self._raise_error()
            self._tokens.append(token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may only end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            self._matcher, self._tokens = self._start.deep_copy(), []
            raise InvalidGenerationRequest(
                f"{self._parameter} asks for a form that is too complex: {why}", parameter=self._parameter
            )


class GrammarCompiler:
    """Compiles the constraints for one model. May be used from several threads.

    Args:
        tokenizer: the model's.
        vocabulary_size: how many scores the model computes.
        end_tokens: tokens that end an answer; by default the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, end_tokens: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_tokens = list(end_tokens) or [end for end in (tokenizer.eos_token_id,) if end is not None]
        self._lock = threading.Lock()
        self._grammar_tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(MAX_CACHED_GRAMMARS)(self._compile)

    def constraint(
        self, form: AnswerForm | None, tools: ToolOptions, syntax: ToolSyntax | None
    ) -> GrammarConstraint | None:
        """The constraint on an answer; None if it may be any text.

        Args:
            form: what the request asks for; None for any text.
            tools: functions that the model may call, or has to.
            syntax: how the model writes calls; None if it does not support tools.

        Raises:
            InvalidGenerationRequest: the form is unknown, too large, or cannot be compiled.
        """
        if tools.must_call:
            functions = _callable_functions(tools)
            if syntax is None:
                raise InvalidGenerationRequest("this model cannot be forced to call a tool", parameter="tool_choice")
            calls = [self._call_grammar(function, syntax) for function in functions]
            return self._constraint_of(calls, "tool_choice")
        answer = _answer_grammar(form) if form is not None else None
        if form is None or answer is None:
            return None
        alternatives = [answer]
        if syntax is not None and tools.choice != "none":
            alternatives += [self._call_grammar(function, syntax) for function in tools.functions]
        return self._constraint_of(alternatives, form.parameter)

    def _constraint_of(self, alternatives: Sequence[str], parameter: str) -> GrammarConstraint:
        if sum(len(grammar) for grammar in alternatives) > MAX_SCHEMA_CHARACTERS:
            raise InvalidGenerationRequest(
                f"the schemas are longer than {MAX_SCHEMA_CHARACTERS >> 10} KiB", parameter=parameter
            )
        return GrammarConstraint(self._compiled(" | ".join(alternatives), parameter), parameter)

    def _compile(self, grammar: str, parameter: str) -> LLMatcher:
        tokenizer = self._llguidance_tokenizer()
        why = grammar_error(START_RULE + grammar) if grammar != ANY_OBJECT else ""
        if not why:
            lark = LLMatcher.grammar_from_lark(START_RULE + grammar)
            matcher = LLMatcher(tokenizer, lark, log_level=0, limits=PARSER_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds errors that only show in use, such as a schema that is only itself
            if not matcher.is_error() and not matcher.is_stopped():
                return matcher
            error = matcher.get_error()
            why = "no text fulfils it" if _first_line(error) in UNSATISFIABLE else error
        raise InvalidGenerationRequest(
            f"the schema cannot be used: {_first_line(why)}", parameter=parameter, code="invalid_schema"
        )

    def _llguidance_tokenizer(self) -> LLTokenizer:
        """The tokenizer in llguidance's form. Takes a second for a large vocabulary."""
        with self._lock:
            if self._grammar_tokenizer is None:
                backend = getattr(self._tokenizer, "backend_tokenizer", None)
                if backend is None or not self._end_tokens:
                    raise InvalidGenerationRequest("this model's tokenizer does not support response formats")
                description = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
                size = max(self._vocabulary_size, len(self._tokenizer))
                self._grammar_tokenizer = LLTokenizer(json.dumps(description), n_vocab=size, eos_token=self._end_tokens)
            return self._grammar_tokenizer

    def _call_grammar(self, function: ToolFunction, syntax: ToolSyntax) -> str:
        """The grammar of a call as the family writes it."""
        schema = dict(function.parameters or {})
        if schema.setdefault("type", "object") != "object":
            raise InvalidGenerationRequest(
                f"the parameters of {function.name} are not an object", parameter="tools", code="invalid_schema"
            )
        call = f'{{"name": "{{name}}", "{syntax.arguments}": {{arguments}}}}'
        before, after = syntax.call_template.replace("{call}", call).split("{arguments}")
        arguments = _json_grammar(schema, strict=bool(function.strict))
        return f"{self._literal(before.replace('{name}', function.name))} {arguments} {self._literal(after)}".strip()

    def _literal(self, text: str) -> str:
        """The grammar of a fixed text. Parts that are special tokens are written as these tokens."""
        special: Mapping[str, int] = self._tokenizer.get_added_vocab()
        pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _callable_functions(tools: ToolOptions) -> Sequence[ToolFunction]:
    """The functions of which one has to be called."""
    if tools.forced_function is None:
        return tools.functions
    named = [function for function in tools.functions if function.name == tools.forced_function]
    if not named:
        raise InvalidGenerationRequest(
            f"tool_choice names {tools.forced_function[:64]!r}, which is not in tools", parameter="tool_choice"
        )
    return named


def _answer_grammar(asked: AnswerForm) -> str | None:
    """The grammar of an answer that does not call a tool; None if it may be any text."""
    try:
        form = msgspec.convert(asked.value, ResponseFormat)
    except msgspec.ValidationError as error:
        message = f"{asked.parameter}: {error}".replace("`$.", "`")
        raise InvalidGenerationRequest(message, parameter=asked.parameter) from None
    if form.type == "regex" and form.regex is not None:
        return regex_grammar(form.regex, asked.parameter)
    if form.type == "choice" and form.choice is not None:
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.type in ("regex", "choice"):
        raise InvalidGenerationRequest(
            f"{asked.parameter} of type {form.type} needs {form.type}", parameter=asked.parameter
        )
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidGenerationRequest(
            f"{asked.parameter} json_schema needs json_schema.schema", parameter=asked.parameter
        )
    return _json_grammar(form.json_schema.schema, strict=bool(form.json_schema.strict))


def regex_grammar(pattern: str, parameter: str) -> str:
    """The grammar of texts that a regular expression matches from beginning to end.

    Raises:
        InvalidGenerationRequest: it is not one.
    """
    parts = _REGEX_PARTS.findall(pattern)
    if "".join(parts) != pattern:
        raise InvalidGenerationRequest(
            f"{parameter} ends with a backslash that escapes nothing", parameter=parameter, code="invalid_schema"
        )
    return "/" + "".join(_REGEX_ESCAPES.get(part, part) for part in parts) + "/"


_REGEX_PARTS = re.compile(r"\\.|[^\\]", re.DOTALL)
"""A character of a regular expression, or one that is escaped."""

_REGEX_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"} | {"\\\n": r"\n", "\\\r": r"\r"}
"""What would end the expression in a grammar's text."""


def _json_grammar(schema: Mapping[str, Any], strict: bool) -> str:
    """The grammar of JSON that fulfils the schema. Keywords that llguidance does not know are ignored unless strict."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": not strict}
    try:
        return "%json " + json.dumps({**schema, "x-guidance": options})
    except RecursionError:
        raise InvalidGenerationRequest("the schema is nested too deeply", code="invalid_schema") from None


def _first_line(text: str) -> str:
    """The first line of an error, for people."""
    return next((line.strip()[:MAX_ERROR_CHARACTERS] for line in text.splitlines() if line.strip()), "")


ANY_OBJECT = _json_grammar({"type": "object"}, strict=True)
