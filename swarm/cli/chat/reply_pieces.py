"""The pieces of an answer, read from a gateway's stream: OpenAI's chunks, and the details beside them (pure).

All of it comes from strangers: the model, the operator of the gateway, the operators of servers. So its form is
validated, and characters that control a terminal are removed.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import msgspec

from swarm.errors import SwarmError

MAX_SERVER_NAME_CHARACTERS = 40
"""Of a server's name, as far as it is shown."""

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
class SummaryPiece:
    """The answer is complete."""

    tokens: int
    seconds: float
    tokens_per_second: float | None


ReplyPiece = TextPiece | RoutePiece | NoticePiece | SummaryPiece


def strip_controls(text: str) -> str:
    """The text without control characters (such as ESC), except for line breaks and tabs.

    The text after an ESC stays: without it, a terminal shows it like any other text.
    """
    return "".join(character for character in text if character in _ALLOWED_CONTROLS or _is_printable(character))


def _is_printable(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _DIRECTION_CONTROLS


class _ChunkDelta(msgspec.Struct):
    content: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _ChunkDelta = msgspec.field(default_factory=_ChunkDelta)


class _ChunkError(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    error: _ChunkError | None = None


class _HopDetail(msgspec.Struct):
    blocks: str
    peer: str
    name: str = ""


class _RouteDetail(msgspec.Struct, tag_field="kind", tag="route"):
    hops: list[_HopDetail]


class _LostDetail(msgspec.Struct, tag_field="kind", tag="lost"):
    peer: str
    blocks: str


class _MissingDetail(msgspec.Struct, tag_field="kind", tag="missing"):
    blocks: str


class _RecoveredDetail(msgspec.Struct, tag_field="kind", tag="recovered"):
    seconds: float


class _DoneDetail(msgspec.Struct, tag_field="kind", tag="done"):
    tokens: int
    seconds: float
    tokens_per_second: float | None = None


_Detail = _RouteDetail | _LostDetail | _MissingDetail | _RecoveredDetail | _DoneDetail
_DETAIL_KINDS = frozenset({"route", "lost", "missing", "recovered", "done"})


def read_chunk(body: Any) -> TextPiece | None:
    """The text in one of OpenAI's chunks; None if it has none.

    Raises:
        ChatFailed: the chunk reports an error, or is not a chunk.
    """
    try:
        chunk = msgspec.convert(body, _Chunk)
    except msgspec.ValidationError as error:
        raise ChatFailed(f"the gateway sent an invalid part of an answer: {strip_controls(str(error))}") from None
    if chunk.error is not None:
        raise ChatFailed(strip_controls(chunk.error.message))
    text = "".join(choice.delta.content or "" for choice in chunk.choices)
    return TextPiece(strip_controls(text)) if text else None


def read_detail(body: Any) -> ReplyPiece | None:
    """The piece for a detail; None if its kind is not known here.

    Raises:
        ChatFailed: the detail is of a known kind, but not valid.
    """
    if not isinstance(body, dict) or body.get("kind") not in _DETAIL_KINDS:
        return None
    try:
        detail = msgspec.convert(body, _Detail)
    except msgspec.ValidationError as error:
        raise ChatFailed(f"the gateway sent an invalid detail: {strip_controls(str(error))}") from None
    match detail:
        case _RouteDetail(hops):
            return RoutePiece(tuple(_describe_hop(hop) for hop in hops))
        case _LostDetail(peer, blocks):
            return NoticePiece(strip_controls(f"{peer} with blocks {blocks} failed; looking for another server"))
        case _MissingDetail(blocks):
            return NoticePiece(strip_controls(f"no server holds blocks {blocks}; waiting for one"))
        case _RecoveredDetail(seconds):
            return NoticePiece(f"continuing after {seconds:.1f} s")
    return SummaryPiece(detail.tokens, detail.seconds, detail.tokens_per_second)


def _describe_hop(hop: _HopDetail) -> str:
    name = strip_controls(hop.name)[:MAX_SERVER_NAME_CHARACTERS]
    return strip_controls(f"{hop.blocks} {hop.peer}") + (f" ({name})" if name else "")
