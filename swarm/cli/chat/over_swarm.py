"""Talking to a model straight in the swarm: what a gateway does for a request, without HTTP in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from swarm.cli.chat.conversation import Hears, Message, Wishes
from swarm.cli.chat.reply_stream import read_chunk, read_detail
from swarm.gateway.answering import Answering, Chunk
from swarm.gateway.prompts import chat_works
from swarm.gateway.replies import ChatReplies
from swarm.gateway.requests import ChatMessage, ChatRequest
from swarm.gateway.service import ServedModel, Settings
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import new_registry


class SwarmTalk:
    """A model of the swarm, whose embeddings and head this process holds.

    Args:
        source: local folder or hub id; None for the demo model.
        options: of `from_pretrained`.

    Raises `UsageError` of the fitting kind.
    """

    def __init__(self, source: str | None, **options: Any) -> None:
        self._served = ServedModel.load(source, **options)
        self._metrics = GatewayMetrics(new_registry())
        self._runner = asyncio.Runner()

    @property
    def model(self) -> str:
        return self._served.name

    def answer(self, messages: Sequence[Message], wishes: Wishes, hear: Hears) -> None:
        """See `Talk`."""
        self._runner.run(self._answer(messages, wishes, hear))

    def close(self) -> None:
        """Leave the swarm."""
        self._runner.close()
        self._served.model.swarm.close()

    async def _answer(self, messages: Sequence[Message], wishes: Wishes, hear: Hears) -> None:
        request = ChatRequest(
            model=self.model,
            messages=[ChatMessage(role=one.role, content=one.content) for one in messages],  # type: ignore[arg-type]
            temperature=wishes.temperature,
            max_tokens=wishes.max_tokens,
            seed=wishes.seed,
        )
        works = chat_works(request, self._served, Settings.default_tokens)
        replies = ChatReplies(self._served.name, self._served.tokenizer)
        answering = Answering(self._served, works, replies, 1, time.perf_counter(), self._metrics)
        async with answering.running(), aclosing(answering.stream(include_usage=False)) as parts:
            async for part in parts:
                piece = read_chunk(part.body) if isinstance(part, Chunk) else read_detail(part.body)
                if piece is not None:
                    hear(piece)
