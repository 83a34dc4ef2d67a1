"""Generates the answers of a conversation in the swarm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from swarm.cli.chat.conversation import (
    AnswerOptions,
    Message,
    NoticePiece,
    OnPiece,
    ProgressPiece,
    ReplyPiece,
    RoutePiece,
    SummaryPiece,
    TextPiece,
    strip_controls,
)
from swarm.client.early_exit.options import EarlyExit
from swarm.client.routes.events import BlocksMissing, HopLost, Recovered, RouteTaken
from swarm.data_structures import Hop
from swarm.errors import format_blocks
from swarm.generation.prompts import chat_sequences
from swarm.generation.sequence_generation import PromptProgress, RoomAwaited, SequenceEvent
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.sequence_output import SequenceDelta
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel, add_drafts

MAX_SERVER_NAME_CHARACTERS = 40
"""Of a server's name, as far as it is shown."""


class SwarmBackend:
    """A model of the swarm, of which this process holds embeddings and head.

    Args:
        source: local folder or hub id; None for the demo model.
        options: of `from_pretrained`.

    Raises:
        UsageError: the model cannot be found or used, or no initial peer answers; see `from_pretrained`.
    """

    def __init__(self, source: str | None, **options: Any) -> None:
        self._served = ServedModel.load(source, **options)
        self._runner = asyncio.Runner()

    @property
    def model(self) -> str:
        return self._served.name

    def add_drafts(self, drafts: Sequence[str]) -> None:
        """Let drafts guess in all answers; see `swarm.generation.served_model.add_drafts`."""
        add_drafts([self._served], drafts)

    def answer(self, messages: Sequence[Message], options: AnswerOptions, on_piece: OnPiece) -> None:
        """Answer the last message. Ctrl-C ends the answer and its session with `KeyboardInterrupt`.

        Raises `SwarmError`: the answer failed.
        """
        self._runner.run(self._answer(messages, options, on_piece))

    def close(self) -> None:
        """Leave the swarm."""
        self._runner.close()
        self._served.close()

    async def _answer(self, messages: Sequence[Message], options: AnswerOptions, on_piece: OnPiece) -> None:
        sequences = chat_sequences(
            self._served,
            messages,
            SequenceRequest(
                temperature=options.temperature,
                max_tokens=options.max_tokens,
                early_exit=None if options.early_exit is None else EarlyExit(threshold=options.early_exit),
                is_exit_asked=options.early_exit is not None,
            ),
        )
        group = SequenceGroup(self._served, sequences, 1, time.perf_counter())
        async with group.generating(), aclosing(group.events()) as events:
            async for _, event in events:
                if (piece := piece_of(event)) is not None:
                    on_piece(piece)
            summary = group.summary()
            on_piece(SummaryPiece(summary["tokens"], summary["seconds"], summary["tokens_per_second"]))


def piece_of(event: SequenceEvent) -> ReplyPiece | None:
    """What is shown of an event; None if nothing is."""
    match event:
        case SequenceDelta():
            return TextPiece(strip_controls(event.text)) if event.text else None
        case RouteTaken(route):
            return RoutePiece(tuple(map(_describe_hop, route.hops)))
        case HopLost(peer_id, span):
            return NoticePiece(f"…{peer_id[-6:]} with blocks {span} failed; looking for another server")
        case BlocksMissing(blocks):
            return NoticePiece(f"no server holds blocks {format_blocks(blocks)}; waiting for one")
        case Recovered(seconds):
            return NoticePiece(f"continuing after {seconds:.1f} s")
        case RoomAwaited():
            return NoticePiece("the servers are full; waiting for room")
        case PromptProgress(computed, tokens):
            return ProgressPiece(f"reading the conversation: {computed:,} of {tokens:,} tokens")
    return None


def _describe_hop(hop: Hop) -> str:
    name = strip_controls(hop.server.name)[:MAX_SERVER_NAME_CHARACTERS]
    return f"{hop.span} {hop.server.short_id}" + (f" ({name})" if name else "")
