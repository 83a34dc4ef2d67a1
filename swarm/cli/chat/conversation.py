"""A conversation, what a line of the user means in it, and the pieces of an answer (pure).

Their texts come from strangers: the model, and the operators of servers. So characters that control a terminal are
removed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.errors import SwarmError, UsageError

_ALLOWED_CONTROLS = "\n\t"
_DIRECTION_CONTROLS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of the text around them."""


class ChatFailed(SwarmError):
    """There is no complete answer."""


@dataclass(frozen=True)
class TextPiece:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class RoutePiece:
    """The route that the answer takes from now on, with a description of each server."""

    hops: tuple[str, ...]


@dataclass(frozen=True)
class NoticePiece:
    """Something happened to the route."""

    text: str


@dataclass(frozen=True)
class ProgressPiece:
    """How far the answer is. Takes the place of the one before."""

    text: str


@dataclass(frozen=True)
class SummaryPiece:
    """The answer is complete."""

    tokens: int
    seconds: float
    tokens_per_second: float | None


ReplyPiece = TextPiece | RoutePiece | NoticePiece | ProgressPiece | SummaryPiece


def strip_controls(text: str) -> str:
    """The text without control characters (such as ESC), except for line breaks and tabs.

    The text after an ESC stays: without it, a terminal shows it like any other text.
    """
    return "".join(character for character in text if character in _ALLOWED_CONTROLS or _is_printable(character))


def _is_printable(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _DIRECTION_CONTROLS


class InvalidCommand(UsageError):
    """The line is a command that does not exist or cannot be carried out."""


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are generated; None takes the model's default.

    Attributes:
        early_exit: tokens leave early, verified, where their confidence is above this.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    early_exit: float | None = None


Message = dict[str, str]
"""As chat templates and OpenAI's interface have it: `role` is "system", "user" or "assistant", and `content` a text."""

OnPiece = Callable[[ReplyPiece], None]
"""Called with each piece of an answer."""


@dataclass(frozen=True)
class Conversation:
    """The messages so far.

    Attributes:
        system: instructions for the model; "" for none.
        exchanged: messages of the user and the assistant in turn.
    """

    system: str = ""
    exchanged: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, as the model receives them."""
        system = ({"role": "system", "content": self.system},) if self.system else ()
        return (*system, *self.exchanged)

    def with_question(self, text: str) -> Conversation:
        return replace(self, exchanged=(*self.exchanged, {"role": "user", "content": text}))

    def with_answer(self, text: str) -> Conversation:
        return replace(self, exchanged=(*self.exchanged, {"role": "assistant", "content": text}))

    def without_last_answer(self) -> Conversation:
        """The conversation up to the last question.

        Raises:
            InvalidCommand: there is no question yet.
        """
        for count in range(len(self.exchanged), 0, -1):
            if self.exchanged[count - 1]["role"] == "user":
                return replace(self, exchanged=self.exchanged[:count])
        raise InvalidCommand("there is no question yet that could be answered again")


COMMANDS = {
    "help": "show this list",
    "clear": "start a new conversation; the system prompt stays",
    "system": "TEXT: set the system prompt; without TEXT, remove it",
    "retry": "answer the last question again",
    "save": "FILE: write the conversation as JSON, in OpenAI's format",
    "route": "show the servers that computed the last answer",
    "quit": "leave; Ctrl-D does the same",
}


def parse_command(line: str) -> tuple[str, str] | None:
    """Name and argument of the command in a line; None if the line is a message. `//` begins a message with a slash.

    Raises:
        InvalidCommand: there is no such command.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        raise InvalidCommand(f"there is no command /{name}: /help lists all, and // begins a message with a slash")
    return name, argument.strip()


def parse_message(line: str) -> str:
    """The message in a line."""
    return line[1:] if line.startswith("//") else line
