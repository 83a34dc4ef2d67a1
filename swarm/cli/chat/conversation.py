"""A conversation, and what a person's line means in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.cli.chat.reply_stream import Piece
from swarm.errors import UsageError


class NotPossible(UsageError):
    """The line is a command that means nothing here."""


@dataclass(frozen=True)
class Message:
    """Attributes:
    role: "system", "user" or "assistant".
    """

    role: str
    content: str


@dataclass(frozen=True)
class Wishes:
    """How answers are chosen; None leaves it to the model's makers and the gateway."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Hears(Protocol):
    """What is told of an answer, piece by piece."""

    def __call__(self, piece: Piece, /) -> None: ...


class Talk(Protocol):
    """Somebody who answers.

    Attributes:
        model: the model's name.
    """

    @property
    def model(self) -> str: ...

    def answer(self, messages: Sequence[Message], wishes: Wishes, hear: Hears) -> None:
        """Answer the last message. Ctrl-C ends it, and its session, with `KeyboardInterrupt`. Raises `SwarmError`."""

    def close(self) -> None:
        """Leave."""


@dataclass(frozen=True)
class Conversation:
    """What was said so far.

    Attributes:
        system: how the model is told to behave; "" says nothing.
        said: by the user and the assistant in turn.
    """

    system: str = ""
    said: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """What a model is given."""
        return (*((Message("system", self.system),) if self.system else ()), *self.said)

    def asked(self, text: str) -> Conversation:
        return replace(self, said=(*self.said, Message("user", text)))

    def answered(self, text: str) -> Conversation:
        return replace(self, said=(*self.said, Message("assistant", text)))

    def again(self) -> Conversation:
        """Up to the last question, without its answer. Raises `NotPossible` if nothing was asked."""
        for count in range(len(self.said), 0, -1):
            if self.said[count - 1].role == "user":
                return replace(self, said=self.said[:count])
        raise NotPossible("nothing was asked yet")


COMMANDS = {
    "help": "this list",
    "clear": "begin anew; the system text stays",
    "system": "TEXT: how the model shall behave from now on; without TEXT: no such text",
    "retry": "another answer to the last question",
    "save": "FILE: write the conversation as JSON, in OpenAI's form",
    "route": "which servers the last answer came from",
    "quit": "leave; Ctrl-D does too",
}


def command_of(line: str) -> tuple[str, str] | None:
    """The command that a line is, and the rest of it; None if it is a message. Raises `NotPossible` for unknown ones.

    A message that begins with a slash is written with two.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        raise NotPossible(f"there is no /{name}; /help lists what there is, and // begins a message with /")
    return name, rest.strip()


def message_of(line: str) -> str:
    """The message that a line is."""
    return line[1:] if line.startswith("//") else line
