"""From the events of a request's sequences to its response in OpenAI's form, whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import SequenceEnd, SequenceProvisional
from swarm.generation.sequence_group import SequenceGroup, route_detail
from swarm.generation.sequence_output import SequenceDelta, token_text
from swarm.generation.served_model import ServedModel

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for an impossible token."""

ID_BYTES = 12


@dataclass
class AccumulatedAnswer:
    """One of the answers to a request, as far as it has been generated.

    Attributes:
        reason: why it ended; None as long as it has not.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    prompt: list[SampledToken] = field(default_factory=list)
    reason: str | None = None

    def add_delta(self, delta: SequenceDelta) -> None:
        self.texts.append(delta.text)
        self.thoughts.append(delta.thought)
        self.calls.extend(delta.calls)
        self.tokens.extend(delta.tokens)
        self.prompt.extend(delta.prompt)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`: how many tokens a request took, and how many of the prompt's were computed before."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def model_object(served: ServedModel) -> dict[str, Any]:
    """OpenAI's model object, with the fields that vLLM and OpenRouter add, and this project's under `swarm`."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "swarm",
        "context_length": served.context_length,
        "max_model_len": served.context_length,
        "architecture": {"input_modalities": ["text"] if served.no_images else ["text", "image"]},
        "swarm": {
            "chat_template": served.chat_template is not None,
            "tools": served.tool_syntax is not None,
            "context_length": served.context_length,
            "blocks": served.model.swarm.blocks,
        },
    }


class ResponseWriter:
    """Writes the response to one request.

    Args:
        model: its name.
        tokenizer: the model's, for log probabilities.
        prompts: texts to repeat in front of the answers (`echo`).
        fingerprint: OpenAI's `system_fingerprint`.
        include_usage: whether a stream ends with the usage; then `usage` is null in the chunks before.
    """

    id_prefix: str
    object_type: str
    chunk_object_type: str

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        prompts: Sequence[str] = (),
        *,
        include_usage: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(ID_BYTES)}"
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._created = int(time.time())
        self._fingerprint = fingerprint
        self._unknown_usage: dict[str, None] = {"usage": None} if include_usage else {}

    def body(self, answers: Sequence[AccumulatedAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choices = [
            {"index": index, **self._choice(index, answer), "finish_reason": answer.reason}
            for index, answer in enumerate(answers)
        ]
        return {**self._envelope(self.object_type), "choices": choices, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins an answer; None if there is no such chunk."""
        raise NotImplementedError

    def delta_chunk(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> dict[str, Any]:
        """The chunk for new output of an answer; `before` is the answer without it."""
        raise NotImplementedError

    def last_chunk(self, index: int, reason: str) -> dict[str, Any]:
        """The chunk that ends an answer."""
        raise NotImplementedError

    def _choice(self, index: int, answer: AccumulatedAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that ends a stream with the request's usage."""
        return {**self._envelope(self.chunk_object_type), "choices": [], "usage": usage}

    def _envelope(self, object_type: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_type,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": reason}
        return {**self._envelope(self.chunk_object_type), "choices": [choice], **self._unknown_usage}


class ChatResponseWriter(ResponseWriter):
    """Responses of `/v1/chat/completions`."""

    id_prefix, object_type, chunk_object_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def delta_chunk(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.thought:
            content["reasoning_content"] = delta.thought
        if delta.calls:
            count = len(before.calls)
            content["tool_calls"] = [{"index": count + i, **_tool_call(call)} for i, call in enumerate(delta.calls)]
        return self._chunk(index, {"delta": content, "logprobs": self._logprobs(delta.tokens)})

    def last_chunk(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {"delta": {}, "logprobs": None}, reason)

    def _choice(self, index: int, answer: AccumulatedAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if thought := "".join(answer.thoughts):
            message["reasoning_content"] = thought
        if answer.calls:
            message["content"] = answer.text.strip() or None
            message["tool_calls"] = [_tool_call(call) for call in answer.calls]
        return {"message": message, "logprobs": self._logprobs(answer.tokens)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        reported = [sampled for sampled in tokens if sampled.logprob is not None]
        if not reported:
            return None
        return {
            "content": [
                {
                    **self._token_logprob(sampled.token, sampled.logprob or 0.0),
                    "top_logprobs": [self._token_logprob(token, logprob) for token, logprob in sampled.top_logprobs],
                }
                for sampled in reported
            ],
            "refusal": None,
        }

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(self._tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}


class CompletionResponseWriter(ResponseWriter):
    """Responses of `/v1/completions`."""

    id_prefix, object_type, chunk_object_type = "cmpl", "text_completion", "text_completion"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"text": self._prompts[index], "logprobs": None}) if self._prompts else None

    def delta_chunk(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> dict[str, Any]:
        offset = len(self._front(index)) + len(before.text)
        return self._chunk(index, {"text": delta.text, "logprobs": self._logprobs(delta.prompt, delta.tokens, offset)})

    def last_chunk(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {"text": "", "logprobs": None}, reason)

    def _choice(self, index: int, answer: AccumulatedAnswer) -> dict[str, Any]:
        front = self._front(index)
        return {"text": front + answer.text, "logprobs": self._logprobs(answer.prompt, answer.tokens, len(front))}

    def _front(self, index: int) -> str:
        """What is repeated in front of an answer."""
        return self._prompts[index] if self._prompts else ""

    def _logprobs(
        self, prompt: Sequence[SampledToken], tokens: Sequence[SampledToken], offset: int
    ) -> dict[str, Any] | None:
        """OpenAI's `logprobs`.

        Args:
            prompt: the prompt's tokens, if they are reported.
            tokens: those behind `offset` characters of the text.
        """
        reported = [*prompt, *(sampled for sampled in tokens if sampled.logprob is not None)]
        if not reported:
            return None
        return {
            "tokens": [self._text(sampled.token) for sampled in reported],
            "token_logprobs": [_finite(one.logprob) if one.logprob is not None else None for one in reported],
            "top_logprobs": [self._top(sampled) for sampled in reported],
            "text_offset": [*self._offsets(prompt, 0), *self._offsets(reported[len(prompt) :], offset)],
        }

    def _offsets(self, tokens: Sequence[SampledToken], offset: int) -> list[int]:
        """Where the tokens' texts begin. Special tokens have none: the text is without them."""
        offsets = []
        for sampled in tokens:
            offsets.append(offset)
            offset += 0 if sampled.token in self._tokenizer.all_special_ids else len(self._text(sampled.token))
        return offsets

    def _top(self, sampled: SampledToken) -> dict[str, float] | None:
        """The likeliest tokens and the one that was chosen; of tokens with the same text, the likeliest."""
        if sampled.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*sampled.top_logprobs, (sampled.token, sampled.logprob)):
            top.setdefault(self._text(token), _finite(logprob))
        return top

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)[0]


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(ID_BYTES)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


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


def group_usage(group: SequenceGroup) -> dict[str, Any]:
    """OpenAI's `usage` of a request so far."""
    return usage_object(group.prompt_tokens, group.completion_tokens, group.cached_tokens)
