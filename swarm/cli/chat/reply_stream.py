"""What is heard of an answer, read from what gateways stream: OpenAI's chunks, and the details beside them. Pure.

Everything in it was written by strangers: the model, whoever runs the gateway, whoever named a server. So shapes are
checked, and no text keeps a character that a terminal would obey.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import msgspec

from swarm.errors import SwarmError

MAX_NAME = 40
"""Characters of a server's name that are shown."""

_KEPT = "\n\t"
_TURNING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of what stands around them."""


class ChatFailed(SwarmError):
    """There is no answer, or no whole one."""


@dataclass(frozen=True)
class Text:
    """The answer goes on."""

    text: str


@dataclass(frozen=True)
class Hops:
    """The way that the answer takes from now on, one text a server."""

    hops: tuple[str, ...]


@dataclass(frozen=True)
class Notice:
    """Something happened to the way."""

    text: str


@dataclass(frozen=True)
class Done:
    """The answer is whole."""

    tokens: int
    seconds: float
    tokens_per_second: float | None


Piece = Text | Hops | Notice | Done


def inert(text: str) -> str:
    """The text without control characters (ESC among them) but for line breaks and tabs: a terminal just shows it.

    What stood behind an ESC stays: without it, it is text like any other.
    """
    return "".join(one for one in text if one in _KEPT or _is_shown(one))


def _is_shown(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _TURNING


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class _Hop(msgspec.Struct):
    blocks: str
    peer: str
    name: str = ""


class _Route(msgspec.Struct, tag_field="kind", tag="route"):
    hops: list[_Hop]


class _Lost(msgspec.Struct, tag_field="kind", tag="lost"):
    peer: str
    blocks: str


class _Missing(msgspec.Struct, tag_field="kind", tag="missing"):
    blocks: str


class _Recovered(msgspec.Struct, tag_field="kind", tag="recovered"):
    seconds: float


class _Done(msgspec.Struct, tag_field="kind", tag="done"):
    tokens: int
    seconds: float
    tokens_per_second: float | None = None


_Detail = _Route | _Lost | _Missing | _Recovered | _Done
_KINDS = frozenset({"route", "lost", "missing", "recovered", "done"})


def read_chunk(body: Any) -> Text | None:
    """A chunk of OpenAI's form; None if it brings no text. Raises `ChatFailed` for an error or anything else."""
    try:
        chunk = msgspec.convert(body, _Chunk)
    except msgspec.ValidationError as error:
        raise ChatFailed(f"the gateway sent what is no piece of an answer: {inert(str(error))}") from None
    if chunk.error is not None:
        raise ChatFailed(inert(chunk.error.message))
    text = "".join(choice.delta.content or "" for choice in chunk.choices)
    return Text(inert(text)) if text else None


def read_detail(body: Any) -> Piece | None:
    """A detail; None if it is of a kind that is not known here. Raises `ChatFailed` if it cannot be read."""
    if not isinstance(body, dict) or body.get("kind") not in _KINDS:
        return None
    try:
        detail = msgspec.convert(body, _Detail)
    except msgspec.ValidationError as error:
        raise ChatFailed(f"the gateway sent a detail that cannot be read: {inert(str(error))}") from None
    match detail:
        case _Route(hops):
            return Hops(tuple(_hop(hop) for hop in hops))
        case _Lost(peer, blocks):
            return Notice(inert(f"{peer} with blocks {blocks} failed; the swarm looks for another one"))
        case _Missing(blocks):
            return Notice(inert(f"nobody holds blocks {blocks}; waiting for a server"))
        case _Recovered(seconds):
            return Notice(f"going on after {seconds:.1f} s")
    return Done(detail.tokens, detail.seconds, detail.tokens_per_second)


def _hop(hop: _Hop) -> str:
    name = inert(hop.name)[:MAX_NAME]
    return inert(f"{hop.blocks} {hop.peer}") + (f" ({name})" if name else "")
