"""From the events of a request's sequences to its response: chunk by chunk, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from swarm.gateway.openai.response_writers import AccumulatedAnswer, ResponseWriter, usage_object
from swarm.generation.route_details import route_detail
from swarm.generation.sequence_generation import SequenceEnd, SequenceProvisional
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.sequence_output import SequenceDelta


@dataclass(frozen=True)
class ResponseChunk:
    """A chunk of a streamed response, in OpenAI's form."""

    body: dict[str, Any]


@dataclass(frozen=True)
class ResponseDetail:
    """An update on the route or the timing, for clients that ask for details; see `docs/gateway.md`."""

    body: dict[str, Any]


async def stream_response(
    group: SequenceGroup, writer: ResponseWriter, include_usage: bool
) -> AsyncGenerator[ResponseChunk | ResponseDetail]:
    """The response piece by piece.

    Raises:
        SwarmError: the response cannot be completed.
    """
    answers = [AccumulatedAnswer() for _ in range(len(group))]
    started: set[int] = set()
    async with aclosing(group.events()) as events:
        async for index, event in events:
            if isinstance(event, SequenceProvisional):
                yield ResponseDetail({"kind": "provisional", "index": index, "text": event.text})
                continue
            if not isinstance(event, SequenceDelta | SequenceEnd):
                if (detail := route_detail(event)) is not None:
                    yield ResponseDetail(detail)
                continue
            # Only once there is output: when a response has begun, an error can no longer set its status.
            if index not in started and (first := writer.first_chunk(index)) is not None:
                yield ResponseChunk(first)
            started.add(index)
            if isinstance(event, SequenceDelta):
                yield ResponseChunk(writer.delta_chunk(index, event, answers[index]))
                answers[index].add_delta(event)
            else:
                yield ResponseChunk(writer.last_chunk(index, event.reason))
    if include_usage:
        yield ResponseChunk(writer.usage_chunk(group_usage(group)))
    yield ResponseDetail(group.summary())


async def complete_response(group: SequenceGroup, writer: ResponseWriter, *, with_details: bool) -> dict[str, Any]:
    """The whole response, with its details under `swarm` if they are requested.

    Raises:
        SwarmError: the response cannot be completed.
    """
    answers = [AccumulatedAnswer() for _ in range(len(group))]
    details: list[dict[str, Any]] = []
    async with aclosing(group.events()) as events:
        async for index, event in events:
            if isinstance(event, SequenceDelta):
                answers[index].add_delta(event)
            elif isinstance(event, SequenceEnd):
                answers[index].reason = event.reason
            elif (detail := route_detail(event)) is not None:
                details.append(detail)
    details.append(group.summary())
    # In a thread: the log probabilities of a long answer are some hundred thousand tokens to decode.
    body = await asyncio.to_thread(writer.body, answers, group_usage(group))
    return {**body, "swarm": details} if with_details else body


def group_usage(group: SequenceGroup) -> dict[str, int]:
    """OpenAI's `usage` of a request so far."""
    return usage_object(group.prompt_tokens, group.completion_tokens)
