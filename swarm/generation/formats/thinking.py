"""Thoughts in front of an answer: how models mark them, and the parser that separates them while they come (pure).

Laws of the parser:
- How the text is divided into pieces changes nothing: thoughts and content come out the same.
- Only an answer that begins with a thought has one. A marker that stands later is content.
- White space around the thoughts belongs to neither.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class TokenConstraint(Protocol):
    """Restricts the next token, such as to those that continue a JSON text."""

    def mask(self, tokens: Sequence[int], scores_V: torch.Tensor) -> torch.Tensor:
        """The scores `[vocabulary]`, -inf where a token is not allowed behind the generated `tokens`.

        Raises:
            SwarmError: it cannot say which are, behind these tokens.
        """


@dataclass(frozen=True)
class ThinkingSyntax:
    """The markers in front of a thought and behind it."""

    opens: str
    closes: str

    def is_open(self, text: str) -> bool:
        """Whether the text ends inside a thought."""
        return text.rfind(self.opens) > text.rfind(self.closes)

    def is_over(self, text: str) -> bool:
        """Whether the text ends right behind a thought."""
        return text.rstrip().endswith(self.closes)


TABLE = (
    ThinkingSyntax("<think>", "</think>"),  # Qwen, DeepSeek, GLM and most others
    ThinkingSyntax("[THINK]", "[/THINK]"),  # Mistral
    ThinkingSyntax("<seed:think>", "</seed:think>"),
)


def thinking_syntax(chat_template: str) -> ThinkingSyntax | None:
    """How a model with this template marks its thoughts; None if it does not think, or marks them in an unknown way."""
    return next((syntax for syntax in TABLE if syntax.closes in chat_template), None)


class _ParserState(enum.Enum):
    START = enum.auto()  # only white space so far, or a part of the marker
    THOUGHT = enum.auto()
    BEHIND = enum.auto()  # only white space since the thought
    CONTENT = enum.auto()


class ThinkingParser:
    """Separates the thoughts of an answer from its content.

    Args:
        syntax: how the model marks thoughts.
        is_open: whether the prompt has begun a thought already.
    """

    def __init__(self, syntax: ThinkingSyntax, is_open: bool = False) -> None:
        self._syntax = syntax
        self._state = _ParserState.THOUGHT if is_open else _ParserState.START
        self._held = ""
        self._has_thought = False

    @property
    def is_inside(self) -> bool:
        """Whether what comes next belongs to a thought."""
        return self._state is _ParserState.THOUGHT

    def feed(self, text: str) -> tuple[str, str]:
        """Add text, and return the thoughts and the content that are now certain."""
        self._held += text
        thought = ""
        if self._state is _ParserState.START:
            self._read_start()
        if self._state is _ParserState.THOUGHT:
            thought = self._read_thought()
        if self._state is _ParserState.BEHIND and self._held.strip():
            self._held, self._state = self._held.lstrip(), _ParserState.CONTENT
        content = ""
        if self._state is _ParserState.CONTENT:
            content, self._held = self._held, ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        """The answer is complete: what was held back."""
        held, self._held = self._held, ""
        if self._state is _ParserState.THOUGHT:
            return held.rstrip() if self._has_thought else held.strip(), ""
        return "", held if self._state is _ParserState.START else ""

    def _read_start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._syntax.opens):
            self._state, self._held = _ParserState.THOUGHT, begun[len(self._syntax.opens) :]
        elif not self._syntax.opens.startswith(begun):
            self._state = _ParserState.CONTENT

    def _read_thought(self) -> str:
        at = self._held.find(self._syntax.closes)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._syntax.closes) :]
            self._state = _ParserState.BEHIND
        else:
            thought = self._held[: len(self._held) - partial_length(self._held, [self._syntax.closes])].rstrip()
            self._held = self._held[len(thought) :]
        if not self._has_thought:
            thought = thought.lstrip()
        self._has_thought = self._has_thought or bool(thought)
        return thought


class ConstraintBehindThoughts:
    """A form that only what follows the thoughts has to have; implements `TokenConstraint`.

    Args:
        constraint: of what follows.
        opens, closes: the markers' tokens; without `opens`, the answer begins no thought.
        is_open: whether the prompt has begun a thought already.
        end_tokens: tokens that end an answer, which is not allowed in a thought.
    """

    def __init__(
        self, constraint: TokenConstraint, opens: int | None, closes: int, is_open: bool, end_tokens: Sequence[int]
    ) -> None:
        self._constraint = constraint
        self._opens = opens
        self._closes = closes
        self._is_open = is_open
        self._end_tokens = list(end_tokens)

    def mask(self, tokens: Sequence[int], scores_V: torch.Tensor) -> torch.Tensor:
        """See `TokenConstraint`."""
        if not self._is_open and not (tokens and tokens[0] == self._opens):
            masked_V = self._constraint.mask(tokens, scores_V)
            if not tokens and self._opens is not None:
                masked_V = masked_V.clone()
                masked_V[self._opens] = scores_V[self._opens]
            return masked_V
        if self._closes in tokens:
            return self._constraint.mask(tokens[list(tokens).index(self._closes) + 1 :], scores_V)
        masked_V = scores_V.clone()
        masked_V[self._end_tokens] = float("-inf")
        return masked_V


def partial_length(text: str, markers: Sequence[str]) -> int:
    """Number of characters at the end of the text that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(marker.startswith(text[-length:]) for marker in markers)), 0)
