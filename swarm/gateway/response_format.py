"""Answers of a wanted form: JSON, JSON of a schema, or a call of a tool.

A grammar says before every token which ones may follow, so that whatever is sampled has the form. llguidance compiles
the schema and computes the masks (some 0.1 ms a token); it fetches nothing, and time and memory are bounded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from swarm.gateway.failures import BadRequest
from swarm.gateway.requests import ChatRequest, FunctionSpec
from swarm.generation.grammar_check import LIMITS, trouble
from swarm.generation.tool_syntax import ToolSyntax

LONGEST_SCHEMA = 1 << 16
"""Characters of all schemas of a request together."""

KEPT = 32
"""Compiled grammars that are kept: many requests come with the same schema."""

START = "start: "

NOTHING = ("NoExtension", "NoExtensionBias")
"""Reasons why a grammar stops before the first token: there is no text of this form."""

SPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""White space between the parts of JSON. Without an end, a small model may write nothing else."""


class Schema(msgspec.Struct):
    """What OpenAI's `json_schema` holds."""

    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Format(msgspec.Struct):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Constraint:
    """What one answer must be. For one sequence, in one thread at a time.

    Args:
        matcher: at the beginning of the answer.
        param: what asked for it, for messages.
    """

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param

    def mask(self, scores_V: torch.Tensor) -> torch.Tensor:
        """Scores `[vocabulary]` with -inf where a token is not allowed. Once complete, only the end is.

        Raises `BadRequest` where the schema turns out to be too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=min(len(bits) * 8, len(scores_V)), bitorder="little").astype(bool)
        allowed_V = torch.zeros(len(scores_V), dtype=torch.bool)
        allowed_V[: len(allowed)] = torch.from_numpy(allowed)
        return scores_V.masked_fill(~allowed_V.to(scores_V.device), float("-inf"))

    def accept(self, token: int) -> None:
        """`token` comes next. Raises `BadRequest` if it may not."""
        if not self.is_complete:
            self._matcher.consume_token(token)
            self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _line(self._matcher.get_error())
            raise BadRequest(f"{self._param} asks for a form that is too complex: {why}", param=self._param)


class Grammars:
    """Makes the constraints of one model. May be used from several threads.

    Args:
        tokenizer: the model's.
        vocabulary: how many scores the model gives.
        ends: tokens that end an answer; by default the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends) or [end for end in (tokenizer.eos_token_id,) if end is not None]
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled = lru_cache(KEPT)(self._compile)

    def constraint(self, request: ChatRequest, syntax: ToolSyntax | None) -> Constraint | None:
        """What the answer to the request must be; None if it may be anything.

        Raises `BadRequest` for a form that is unknown, cannot be compiled or is too large.
        """
        tools = request.tools or ()
        forced = _forced(request)
        if forced is not None:
            if syntax is None:
                raise BadRequest("this model's calls of tools cannot be forced", param="tool_choice")
            return self._made([self._call(function, syntax) for function in forced], "tool_choice")
        answer = _answer(request.response_format)
        if answer is None:
            return None
        forms = [answer]
        if tools and syntax is not None and request.tool_choice != "none":
            forms += [self._call(tool.function, syntax) for tool in tools]
        return self._made(forms, "response_format")

    def _made(self, forms: Sequence[str], param: str) -> Constraint:
        if sum(len(form) for form in forms) > LONGEST_SCHEMA:
            raise BadRequest(f"the schemas are longer than {LONGEST_SCHEMA >> 10} KiB", param=param)
        return Constraint(self._compiled(" | ".join(forms), param).deep_copy(), param)

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        tokens = self._adopted()
        why = trouble(START + grammar) if grammar != ANY_OBJECT else ""
        if not why:
            matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(START + grammar), log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds what only shows in use, such as a schema that is only itself
            if not matcher.is_error() and not matcher.is_stopped():
                return matcher
            why = "nothing fulfils it" if _line(matcher.get_error()) in NOTHING else matcher.get_error()
        raise BadRequest(f"the schema cannot be used: {_line(why)}", param=param, code="invalid_schema")

    def _adopted(self) -> LLTokenizer:
        """The tokenizer as llguidance knows it. Takes a second for a large vocabulary."""
        with self._lock:
            if self._tokens is None:
                backend = getattr(self._tokenizer, "backend_tokenizer", None)
                if backend is None or not self._ends:
                    raise BadRequest("this model's tokenizer does not allow for answers of a wanted form")
                description = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
                size = max(self._vocabulary, len(self._tokenizer))
                self._tokens = LLTokenizer(json.dumps(description), n_vocab=size, eos_token=self._ends)
            return self._tokens

    def _call(self, function: FunctionSpec, syntax: ToolSyntax) -> str:
        """A call as the family writes it, as a grammar."""
        schema = dict(function.parameters or {})
        if schema.setdefault("type", "object") != "object":
            raise BadRequest(f"parameters of {function.name} are no object", param="tools", code="invalid_schema")
        before, after = syntax.written.replace(
            "{call}", f'{{"name": "{{name}}", "{syntax.arguments}": {{arguments}}}}'
        ).split("{arguments}")
        arguments = _json(schema, strict=bool(function.strict))
        return f"{self._literal(before.replace('{name}', function.name))} {arguments} {self._literal(after)}".strip()

    def _literal(self, text: str) -> str:
        """A text that has to stand there; what is a token of its own, as this token."""
        marks: Mapping[str, int] = self._tokenizer.get_added_vocab()
        pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)"
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False) for part in parts if part
        )


def _forced(request: ChatRequest) -> list[FunctionSpec] | None:
    """The functions of which one has to be called, if one has to be."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return None
    functions = [tool.function for tool in request.tools or ()]
    if isinstance(choice, str):
        return functions
    named = [function for function in functions if function.name == choice.function.name]
    if not named:
        raise BadRequest(f"tool_choice names {choice.function.name[:64]!r}, which is not in tools", param="tool_choice")
    return named


def _answer(response_format: Mapping[str, Any] | None) -> str | None:
    """The form of an answer that calls no tool, as a grammar."""
    if response_format is None:
        return None
    try:
        form = msgspec.convert(response_format, Format)
    except msgspec.ValidationError as error:
        raise BadRequest(f"response_format: {error}".replace("`$.", "`"), param="response_format") from None
    if form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.json_schema is None or form.json_schema.schema is None:
        raise BadRequest("response_format json_schema needs json_schema.schema", param="response_format")
    return _json(form.json_schema.schema, strict=bool(form.json_schema.strict))


def _json(schema: Mapping[str, Any], strict: bool) -> str:
    """JSON of the schema, as a grammar. What llguidance does not know is ignored unless strict."""
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE, "lenient": not strict}})
    except RecursionError:
        raise BadRequest("the schema is nested too deeply", code="invalid_schema") from None


def _line(text: str) -> str:
    """The first line of an error, for people."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


ANY_OBJECT = _json({"type": "object"}, strict=True)
