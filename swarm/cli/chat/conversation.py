"""A conversation, and what a line of the user means in it (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.cli.chat.reply_pieces import ReplyPiece
from swarm.errors import UsageError


class InvalidCommand(UsageError):
    """The line is a command that does not exist or cannot be carried out."""


@dataclass(frozen=True)
class ConversationMessage:
    """One message.

    Attributes:
        role: "system", "user" or "assistant".
    """

    role: str
    content: str


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are generated; None takes the default of the model or the gateway.

    Attributes:
        early_exit: tokens leave early, verified, where their confidence is above this.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    early_exit: float | None = None


OnPiece = Callable[[ReplyPiece], None]
"""Called with each piece of an answer."""


class ChatBackend(Protocol):
    """Generates the answers of a conversation.

    Attributes:
        model: the model's name.
    """

    @property
    def model(self) -> str: ...

    def answer(self, messages: Sequence[ConversationMessage], options: AnswerOptions, on_piece: OnPiece) -> None:
        """Answer the last message. Ctrl-C ends the answer and its session with `KeyboardInterrupt`.

        Raises:
            SwarmError: the answer failed.
        """

    def close(self) -> None:
        """Free all resources."""


@dataclass(frozen=True)
class Conversation:
    """The messages so far.

    Attributes:
        system: instructions for the model; "" for none.
        exchanged: messages of the user and the assistant in turn.
    """

    system: str = ""
    exchanged: tuple[ConversationMessage, ...] = ()

    @property
    def messages(self) -> tuple[ConversationMessage, ...]:
        """All messages, as the model receives them."""
        system = (ConversationMessage("system", self.system),) if self.system else ()
        return (*system, *self.exchanged)

    def with_question(self, text: str) -> Conversation:
        return replace(self, exchanged=(*self.exchanged, ConversationMessage("user", text)))

    def with_answer(self, text: str) -> Conversation:
        return replace(self, exchanged=(*self.exchanged, ConversationMessage("assistant", text)))

    def without_last_answer(self) -> Conversation:
        """The conversation up to the last question.

        Raises:
            InvalidCommand: there is no question yet.
        """
        for count in range(len(self.exchanged), 0, -1):
            if self.exchanged[count - 1].role == "user":
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
