"""The tools that a request offers, and the parser that finds tool calls in an answer while it is written (pure).

Laws of the parser:
- How the text is divided into pieces changes nothing: content and calls come out the same.
- No part of a marker is returned as content while it may still become a call. What turns out not to be a call is
  returned as content, as it was written; so is a call of a function that was not offered.
- Where the answer has to be a call, one that is cut off is returned as a call, with its arguments as far as they go.
- What is held back is at most `MAX_CALL_CHARACTERS`, and every character is read a bounded number of times.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from swarm.generation.formats.thinking import partial_length

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
LIST = re.compile(r"\s*\[?\s*")
"""Text in front of an object that names its function itself: nothing, or the beginning of a list."""


@dataclass(frozen=True)
class ToolSyntax:
    """How a family writes tool calls. The table of them is the only place that knows families.

    A call is one of the markers in `opens`, then what `head` matches, then a JSON object. If `head` finds a name, the
    object holds the arguments; if not, it is {"name": ..., `arguments`: {...}}.

    Attributes:
        family: a name for people.
        template: lists of texts; the family's chat template contains all texts of at least one list.
        opens: markers that begin a call.
        head: everything between the marker and the object.
        closes: markers after a call, which are not content.
        call_template: a call as the family writes it, with {call}, or {name} and {arguments}; for forced calls.
        arguments: name of the field that holds the arguments.
        bare: an answer may begin with a call that has no marker. After a call, the next one never needs a marker.
    """

    family: str
    template: Sequence[Sequence[str]]
    opens: tuple[str, ...]
    head: re.Pattern[str]
    closes: tuple[str, ...]
    call_template: str
    arguments: str = "arguments"
    bare: bool = False

    def matches(self, chat_template: str) -> bool:
        """Whether a model with this chat template belongs to the family."""
        return any(all(text in chat_template for text in texts) for texts in self.template)


_deepseek = partial(
    ToolSyntax,
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    head=re.compile(
        rf"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?"
    ),
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""Both forms are parsed for every template; they differ in the text of a forced call. The same holds for Mistral's."""

_mistral = partial(
    ToolSyntax,
    opens=("[TOOL_CALLS]",),
    head=re.compile(rf"{LIST.pattern}|\s*{NAME}(?:\[CALL_ID\][A-Za-z0-9]{{0,64}})?(?:\[ARGS\])?\s*"),
    closes=(",", "]"),
)

# The markers are those of the chat templates that the families publish. Families whose calls are not JSON (Qwen3-Coder,
# GLM) or are in channels of their own (gpt-oss) are not in the table: their answers are passed on as they are.
TABLE = (
    _deepseek(
        family="DeepSeek V3 and R1",
        template=[("<｜tool▁call▁begin｜>", "```json")],
        call_template="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    _deepseek(
        family="DeepSeek V3.1",
        template=[("<｜tool▁call▁begin｜>",)],
        call_template="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolSyntax(
        family="Kimi K2",
        template=[("<|tool_calls_section_begin|>",)],
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        head=re.compile(
            rf"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?{NAME}:\d{{1,6}}\s*<\|tool_call_argument_begin\|>\s*"
        ),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        call_template="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    _mistral(
        family="Mistral, names before arguments",
        template=[("[TOOL_CALLS]", "[ARGS]")],
        call_template="[TOOL_CALLS]{name}[ARGS]{arguments}",
    ),
    _mistral(
        family="Mistral, a list",
        template=[("[TOOL_CALLS]",)],
        call_template="[TOOL_CALLS][{call}]",
    ),
    ToolSyntax(
        family="Granite",
        template=[("<|tool_call|>",)],
        opens=("<|tool_call|>",),
        head=LIST,
        closes=(",", "]"),
        call_template="<|tool_call|>[{call}]",
    ),
    ToolSyntax(
        family="Llama 3",
        template=[("<|python_tag|>",), ('"parameters": dictionary of argument name',)],
        opens=("<|python_tag|>",),
        head=re.compile(r"\s*"),
        closes=(";", "<|eom_id|>"),
        call_template="{call}",
        arguments="parameters",
        bare=True,
    ),
    ToolSyntax(
        family="Hermes and Qwen",
        template=[("<tool_call>", "</tool_call>")],
        opens=("<tool_call>",),
        head=re.compile(r"\s*"),
        closes=("</tool_call>",),
        call_template="<tool_call>\n{call}\n</tool_call>",
    ),
)

NOT_JSON = ("<function=", "<arg_key>")
"""Texts in templates that use known markers around calls that are not JSON."""


def tool_syntax(chat_template: str) -> ToolSyntax | None:
    """How a model with this template writes calls; None if it has no tools, or writes calls in an unknown way."""
    if any(text in chat_template for text in NOT_JSON):
        return None
    return next((syntax for syntax in TABLE if syntax.matches(chat_template)), None)


MAX_CALL_CHARACTERS = 1 << 17
"""Longer calls are content."""

MAX_CALL_HEAD_CHARACTERS = 256
"""Characters between a marker and its JSON object."""

_BRACE_OR_QUOTE = re.compile(r'[{}"]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by the model.

    Attributes:
        name: of the function.
        arguments: JSON text of an object; the beginning of one if the answer was cut off.
    """

    name: str
    arguments: str

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as an object; empty if they were cut off."""
        try:
            parsed = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}


FunctionNameText = Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call, as in OpenAI's requests.

    Attributes:
        parameters: JSON schema of the arguments.
        strict: whether a schema that cannot be enforced completely is an error.
    """

    name: FunctionNameText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates take it. Templates write it as JSON, so the order of the keys matters."""
        return {"function": msgspec.structs.asdict(self), "type": "function"}


@dataclass(frozen=True)
class ToolOptions:
    """The functions that the model may call, and whether it has to.

    Attributes:
        choice: "auto" leaves it to the model, "none" forbids calls, "required" demands one.
        forced_function: name of the one function that has to be called; None if there is no such function.
        single_call: whether the answer ends with its first call.
    """

    functions: tuple[ToolFunction, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    forced_function: str | None = None
    single_call: bool = False

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required" or self.forced_function is not None


class _ParserState(enum.Enum):
    START = enum.auto()  # only white space so far
    CONTENT = enum.auto()
    CALL = enum.auto()  # the held text begins with a marker, or with an object
    AFTER_CALL = enum.auto()  # only white space and closing markers since a call


class _ObjectScanner:
    """Finds the end of a JSON object in a text that grows. Braces in strings do not count."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def find_end(self, text: str) -> int | None:
        """Where the object ends; None if it continues. `text` is the one of the last call, possibly with more added."""
        while found := (_QUOTE_OR_ESCAPE if self._in_string else _BRACE_OR_QUOTE).search(text, self._at):
            character, self._at = found[0], found.end()
            if character == "\\":
                if self._at == len(text):
                    self._at -= 1  # the escaped character is not there yet
                    return None
                self._at += 1
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


class ToolCallParser:
    """Separates the content of an answer from its tool calls.

    Args:
        syntax: how the model writes calls.
        names: of the functions that the model may call.
        must_call: whether the answer is a call in any case.
        single_call: whether the answer ends with its first call.

    Attributes:
        is_cut: the last call is not complete.
    """

    def __init__(
        self, syntax: ToolSyntax, names: frozenset[str], must_call: bool = False, single_call: bool = False
    ) -> None:
        self.is_cut = False
        self.single_call = single_call
        self._must_call = must_call
        self._syntax = syntax
        self._names = names
        self._state = _ParserState.START
        self._held = ""
        self._space = ""  # in front of the held text; content if that turns out not to be a call
        self._marker_length = 0
        self._object: _ObjectScanner | None = None
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text, and return the content and calls that are now certain."""
        self._held += text
        steps = {
            _ParserState.START: self._read_start,
            _ParserState.AFTER_CALL: self._read_start,
            _ParserState.CONTENT: self._read_content,
            _ParserState.CALL: self._read_call,
        }
        while steps[self._state]():
            pass
        return self._take_output()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The answer is complete: what was held back. An incomplete call is content, unless there has to be one."""
        if self._must_call and self._state in (_ParserState.START, _ParserState.CALL):
            self.is_cut = True
            self._calls += self._cut_call()
        elif self._state is not _ParserState.AFTER_CALL or (self._held.strip() and not self._must_call):
            self._content.append(self._space + self._held)
        self._held = self._space = ""
        return self._take_output()

    def _cut_call(self) -> list[ToolCall]:
        """The call that the held text begins; none if it does not say yet which function is called."""
        if not self._held.strip():
            return []
        only = next(iter(self._names)) if len(self._names) == 1 else None
        if self._object is None:
            return [ToolCall(only, "")] if only is not None else []
        begun = self._held[self._start :]
        if (matched := self._syntax.head.fullmatch(self._head)) and matched.groupdict().get("name"):
            return [ToolCall(matched["name"], begun)]
        named = re.match(r'\{\s*"name"\s*:\s*"([^"]*)"', begun)
        name = named[1] if named is not None else only
        field = re.search(rf'"{self._syntax.arguments}"\s*:\s*', begun[named.end() :] if named is not None else "")
        arguments = begun[named.end() + field.end() :] if named is not None and field is not None else ""
        return [ToolCall(name, arguments)] if name is not None else []

    def _take_output(self) -> tuple[str, list[ToolCall]]:
        output = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return output

    # Each step returns whether more can be done with the held text.

    def _read_start(self) -> bool:
        """At the start or after a call. White space in front of a call is not content."""
        rest = self._held.lstrip()
        space = self._held[: len(self._held) - len(rest)]
        if len(space) > MAX_CALL_CHARACTERS:
            self._state = _ParserState.CONTENT
            return True
        after_call = self._state is _ParserState.AFTER_CALL
        closers = self._syntax.closes if after_call else ()
        closer = next((marker for marker in closers if rest.startswith(marker)), None)
        if closer is not None:
            self._held = rest[len(closer) :]
            return True
        if rest.startswith("{") and (after_call or self._syntax.bare):
            return self._enter_call(rest, 0, space)
        opener = next((marker for marker in self._syntax.opens if rest.startswith(marker)), None)
        if opener is not None:
            return self._enter_call(rest, len(opener), space)
        if not any(marker.startswith(rest) for marker in (*self._syntax.opens, *closers)):
            self._state = _ParserState.CONTENT
            return True
        return False

    def _enter_call(self, held: str, marker_length: int, space: str = "") -> bool:
        self._state, self._held, self._space = _ParserState.CALL, held, space
        self._marker_length, self._object = marker_length, None
        return True

    def _read_content(self) -> bool:
        places = [(at, marker) for marker in self._syntax.opens if (at := self._held.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            self._content.append(self._held[:at])
            return self._enter_call(self._held[at:], len(marker))
        certain = len(self._held) - partial_length(self._held, self._syntax.opens)
        self._content.append(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _read_call(self) -> bool:
        if self._object is None:
            max_head = self._marker_length + MAX_CALL_HEAD_CHARACTERS
            start = self._held.find("{", self._marker_length, max_head)
            if start < 0:
                return self._not_a_call(max_head) if len(self._held) >= max_head else False
            self._head, self._start = self._held[self._marker_length : start], start
            self._object = _ObjectScanner(start)
        end = self._object.find_end(self._held)
        if (len(self._held) if end is None else end) > MAX_CALL_CHARACTERS:
            return self._not_a_call(MAX_CALL_CHARACTERS)
        if end is None:
            return False
        call = self._parse_call(self._head, self._held[self._start : end])
        if call is None:
            return self._not_a_call(end)
        self._calls.append(call)
        self._held, self._space = "" if self.single_call else self._held[end:], ""
        self._state = _ParserState.AFTER_CALL
        return True

    def _not_a_call(self, length: int) -> bool:
        """The held text up to here is content. It is not searched again, so that no text is read over and over."""
        self._content.append(self._space + self._held[:length])
        self._held, self._space = self._held[length:], ""
        self._state = _ParserState.CONTENT
        return True

    def _parse_call(self, head: str, written: str) -> ToolCall | None:
        """The call, if it is one of an offered function."""
        matched = self._syntax.head.fullmatch(head) if self._marker_length else _NOTHING.fullmatch(head)
        if matched is None:
            return None
        name = matched.groupdict().get("name")
        try:
            content = msgspec.json.decode(written, type=dict[str, msgspec.Raw])
            if name is not None:
                return ToolCall(name, written) if name in self._names else None
            name = msgspec.json.decode(content["name"], type=str)
            arguments = _arguments_text(content.get(self._syntax.arguments, b"{}"))
        except (msgspec.DecodeError, KeyError, RecursionError, UnicodeError):
            return None
        return ToolCall(name, arguments) if name in self._names else None


_NOTHING = re.compile("")


def _arguments_text(raw: msgspec.Raw | bytes) -> str:
    """JSON text of an object. Some models write the object once more as a JSON string.

    Raises:
        msgspec.DecodeError: it is not an object.
    """
    text = bytes(raw).decode()
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    msgspec.json.decode(text, type=dict)
    return text
