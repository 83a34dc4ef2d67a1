"""Reads calls of tools out of an answer while it is written (pure).

Laws:
- How the text is cut into pieces changes nothing: the same content and the same calls come out.
- Nothing of a mark is given out as content while it may still become a call. What turns out to be none is content, as
  it was written: a call of a function that nobody offered, too.
- What is held back is bounded by `LONGEST`, and every character is looked at a bounded number of times.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from swarm.generation.tool_syntax import ToolSyntax, tool_syntax

__all__ = ["ToolCall", "ToolParser", "ToolSyntax", "tool_syntax"]

LONGEST = 1 << 17
"""Characters of a call. More are content."""

LONGEST_HEAD = 256
"""Characters between a mark and its object."""

_INSIDE = re.compile(r'[{}"]')
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True)
class ToolCall:
    """Attributes:
    name: of the function.
    arguments: JSON text of an object.
    """

    name: str
    arguments: str


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space came
    CONTENT = enum.auto()
    CALL = enum.auto()  # what is held begins with a mark, or with an object
    BEHIND = enum.auto()  # a call ended, and nothing but white space and closing marks came


class _Object:
    """Looks for the end of an object in a text that grows. Brackets in strings do not count."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Where the object ends; None if it goes on. The same text as before, or a longer one."""
        while found := (_IN_STRING if self._in_string else _INSIDE).search(text, self._at):
            character, self._at = found[0], found.end()
            if character == "\\":
                if self._at == len(text):
                    self._at -= 1  # what it escapes is not there yet
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


class ToolParser:
    """Separates an answer's content and calls.

    Args:
        syntax: how the model writes calls.
        names: of the functions that it may call.
    """

    def __init__(self, syntax: ToolSyntax, names: frozenset[str]) -> None:
        self._syntax = syntax
        self._names = names
        self._state = _State.START
        self._held = ""
        self._space = ""  # before what is held, content if that turns out to be no call
        self._mark = 0
        self._object: _Object | None = None
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The answer goes on; what has become certain."""
        self._held += text
        step = {
            _State.START: self._begin,
            _State.BEHIND: self._begin,
            _State.CONTENT: self._read_content,
            _State.CALL: self._read_call,
        }
        while step[self._state]():
            pass
        return self._given()

    def end(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended; what is left. A call that is not complete is content."""
        if self._state is not _State.BEHIND or self._held.strip():
            self._content.append(self._space + self._held)
        self._held = self._space = ""
        return self._given()

    def _given(self) -> tuple[str, list[ToolCall]]:
        given = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return given

    # Each step returns whether there may be more to do with what is held.

    def _begin(self) -> bool:
        """White space before a call is no content."""
        rest = self._held.lstrip()
        space = self._held[: len(self._held) - len(rest)]
        if len(space) > LONGEST:
            self._state = _State.CONTENT
            return True
        behind = self._state is _State.BEHIND
        closes = self._syntax.closes if behind else ()
        close = next((mark for mark in closes if rest.startswith(mark)), None)
        if close is not None:
            self._held = rest[len(close) :]
            return True
        if rest.startswith("{") and (behind or self._syntax.bare):
            return self._begin_call(rest, 0, space)
        mark = next((mark for mark in self._syntax.opens if rest.startswith(mark)), None)
        if mark is not None:
            return self._begin_call(rest, len(mark), space)
        if not any(mark.startswith(rest) for mark in (*self._syntax.opens, *closes)):
            self._state = _State.CONTENT
            return True
        return False

    def _begin_call(self, held: str, mark: int, space: str = "") -> bool:
        self._state, self._held, self._mark, self._space, self._object = _State.CALL, held, mark, space, None
        return True

    def _read_content(self) -> bool:
        places = [(at, mark) for mark in self._syntax.opens if (at := self._held.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._content.append(self._held[:at])
            return self._begin_call(self._held[at:], len(mark))
        sure = len(self._held) - _begun(self._held, self._syntax.opens)
        self._content.append(self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _read_call(self) -> bool:
        if self._object is None:
            start = self._held.find("{", self._mark, self._mark + LONGEST_HEAD)
            if start < 0:
                return (
                    self._no_call(self._mark + LONGEST_HEAD) if len(self._held) >= self._mark + LONGEST_HEAD else False
                )
            self._head, self._start, self._object = self._held[self._mark : start], start, _Object(start)
        end = self._object.end(self._held)
        if (len(self._held) if end is None else end) > LONGEST:
            return self._no_call(LONGEST)
        if end is None:
            return False
        call = self._call(self._head, self._held[self._start : end])
        if call is None:
            return self._no_call(end)
        self._calls.append(call)
        self._held, self._space = self._held[end:], ""
        self._state = _State.BEHIND
        return True

    def _no_call(self, length: int) -> bool:
        """What is held up to here is content. It is not searched again, so that no text is read over and over."""
        self._content.append(self._space + self._held[:length])
        self._held, self._space = self._held[length:], ""
        self._state = _State.CONTENT
        return True

    def _call(self, head: str, written: str) -> ToolCall | None:
        """The call, if it is one of an offered function."""
        begun = self._syntax.head.fullmatch(head) if self._mark else _BARE.fullmatch(head)
        if begun is None:
            return None
        name = begun.groupdict().get("name")
        try:
            content = msgspec.json.decode(written, type=dict[str, msgspec.Raw])
            if name is not None:
                return ToolCall(name, written) if name in self._names else None
            name = msgspec.json.decode(content["name"], type=str)
            arguments = _object_text(content.get(self._syntax.arguments, b"{}"))
        except (msgspec.DecodeError, KeyError, RecursionError, UnicodeError):
            return None
        return ToolCall(name, arguments) if name in self._names else None


_BARE = re.compile("")


def _object_text(raw: msgspec.Raw | bytes) -> str:
    """JSON text of an object, which some models write once more as text. Raises `msgspec.DecodeError` if it is none."""
    text = bytes(raw).decode()
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    msgspec.json.decode(text, type=dict)
    return text


def _begun(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a mark."""
    longest = max(len(mark) for mark in marks) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )
