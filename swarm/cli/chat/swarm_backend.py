"""Generates the answers of a conversation directly in the swarm, without a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from swarm.cli.chat.conversation import (
    AnswerOptions,
    ConversationMessage,
    OnPiece,
    ReplyPiece,
    TextPiece,
    read_detail,
    strip_controls,
)
from swarm.client.early_exit.options import EarlyExit
from swarm.generation.prompts import chat_sequences
from swarm.generation.sequence_generation import SequenceEvent
from swarm.generation.sequence_group import SequenceGroup, route_detail
from swarm.generation.sequence_output import SequenceDelta
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel


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

    def answer(self, messages: Sequence[ConversationMessage], options: AnswerOptions, on_piece: OnPiece) -> None:
        """See `ChatBackend`."""
        self._runner.run(self._answer(messages, options, on_piece))

    def close(self) -> None:
        """Leave the swarm."""
        self._runner.close()
        self._served.close()

    async def _answer(self, messages: Sequence[ConversationMessage], options: AnswerOptions, on_piece: OnPiece) -> None:
        sequences = chat_sequences(
            self._served,
            [{"role": message.role, "content": message.content} for message in messages],
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
                if (piece := _piece_of(event)) is not None:
                    on_piece(piece)
            if (summary := read_detail(group.summary())) is not None:
                on_piece(summary)


def _piece_of(event: SequenceEvent) -> ReplyPiece | None:
    if isinstance(event, SequenceDelta):
        return TextPiece(strip_controls(event.text)) if event.text else None
    return read_detail(route_detail(event))
