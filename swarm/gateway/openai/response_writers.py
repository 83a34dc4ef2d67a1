"""From the events of a request's sequences to its response, whole or piece by piece, in OpenAI's form."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from swarm.gateway.openai.dialect import StreamEvent
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import SequenceEmbedding, SequenceEnd, SequenceEvent, SequenceProvisional
from swarm.generation.sequence_group import SequenceGroup, Usage, route_detail
from swarm.generation.sequence_output import SequenceDelta, token_text
from swarm.generation.served_model import ServedModel

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for an impossible token."""

ID_BYTES = 12


@dataclass
class AccumulatedAnswer:
    """One of the answers to a request, as far as it has been generated.

    Attributes:
        embedding: of the prompt, if that is what was asked for.
        end: why it ended; None as long as it has not.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    prompt: list[SampledToken] = field(default_factory=list)
    embedding: Sequence[float] = ()
    end: SequenceEnd | None = None

    def add_delta(self, delta: SequenceDelta) -> None:
        self.texts.append(delta.text)
        self.thoughts.append(delta.thought)
        self.calls.extend(delta.calls)
        self.tokens.extend(delta.tokens)
        self.prompt.extend(delta.prompt)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def as_delta(self) -> SequenceDelta:
        """All of it, as if it had come at once."""
        return SequenceDelta(self.text, tuple(self.calls), tuple(self.tokens), "".join(self.thoughts))


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`: how many tokens a request took, and how many of the prompt's were computed before."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thought_tokens},
    }


def model_object(served: ServedModel) -> dict[str, Any]:
    """OpenAI's model object, with the fields of vLLM, OpenRouter and Anthropic, and this project's under `swarm`."""
    return {
        "id": served.name,
        "object": "model",
        "type": "model",
        "display_name": served.name,
        "created_at": served.created_at,
        "lifecycle": "active",
        "max_input_tokens": served.context_length,
        "created": served.created,
        "owned_by": "swarm",
        "context_length": served.context_length,
        "max_model_len": served.context_length,
        "architecture": {"input_modalities": ["text"] if served.no_images else ["text", "image"]},
        "swarm": {
            "chat_template": served.chat_template is not None,
            "tools": served.tool_syntax is not None,
            "embeddings": served.pooling,
            "context_length": served.context_length,
            "blocks": served.model.swarm.blocks,
        },
    }


class ResponseWriter:
    """Writes the response to one request."""

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        raise NotImplementedError

    def first_events(self, index: int, usage: Usage) -> Iterable[StreamEvent]:
        """What begins an answer."""
        return ()

    def delta_events(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> Iterable[StreamEvent]:
        """New output of an answer; `before` is the answer without it."""
        return ()

    def end_events(self, index: int, end: SequenceEnd) -> Iterable[StreamEvent]:
        """What ends an answer."""
        return ()

    def last_events(self, usage: Usage) -> Iterable[StreamEvent]:
        """What ends the stream, once all answers have ended."""
        return ()


class OpenAIResponseWriter(ResponseWriter):
    """What the responses of both of OpenAI's completions have in common.

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
        self.id = new_id(self.id_prefix, "-")
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._created = int(time.time())
        self._fingerprint = fingerprint
        self._include_usage = include_usage

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        choices = [
            {"index": index, **self._choice(index, answer), "finish_reason": answer.end.reason if answer.end else None}
            for index, answer in enumerate(answers)
        ]
        return {**self._envelope(self.object_type), "choices": choices, "usage": usage_object(usage)}

    def last_events(self, usage: Usage) -> Iterable[StreamEvent]:
        if self._include_usage:
            envelope = self._envelope(self.chunk_object_type)
            yield StreamEvent({**envelope, "choices": [], "usage": usage_object(usage)})

    def _choice(self, index: int, answer: AccumulatedAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def _envelope(self, object_type: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_type,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None = None) -> StreamEvent:
        choice = {"index": index, **content, "finish_reason": reason}
        no_usage = {"usage": None} if self._include_usage else {}
        return StreamEvent({**self._envelope(self.chunk_object_type), "choices": [choice], **no_usage})


class ChatResponseWriter(OpenAIResponseWriter):
    """Responses of `/v1/chat/completions`."""

    id_prefix, object_type, chunk_object_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_events(self, index: int, usage: Usage) -> Iterable[StreamEvent]:
        yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def delta_events(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> Iterable[StreamEvent]:
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.thought:
            content["reasoning_content"] = delta.thought
        if delta.calls:
            count = len(before.calls)
            content["tool_calls"] = [{"index": count + i, **_tool_call(call)} for i, call in enumerate(delta.calls)]
        yield self._chunk(index, {"delta": content, "logprobs": self._logprobs(delta.tokens)})

    def end_events(self, index: int, end: SequenceEnd) -> Iterable[StreamEvent]:
        yield self._chunk(index, {"delta": {}, "logprobs": None}, end.reason)

    def _choice(self, index: int, answer: AccumulatedAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if thought := "".join(answer.thoughts):
            message["reasoning_content"] = thought
        if answer.calls:
            message["content"] = answer.text.strip() or None
            message["tool_calls"] = [_tool_call(call) for call in answer.calls]
        return {"message": message, "logprobs": self._logprobs(answer.tokens)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        reported = token_logprobs(self._tokenizer, tokens)
        return {"content": reported, "refusal": None} if reported else None


class CompletionResponseWriter(OpenAIResponseWriter):
    """Responses of `/v1/completions`."""

    id_prefix, object_type, chunk_object_type = "cmpl", "text_completion", "text_completion"

    def first_events(self, index: int, usage: Usage) -> Iterable[StreamEvent]:
        if self._prompts:
            yield self._chunk(index, {"text": self._prompts[index], "logprobs": None})

    def delta_events(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> Iterable[StreamEvent]:
        offset = len(self._front(index)) + len(before.text)
        yield self._chunk(index, {"text": delta.text, "logprobs": self._logprobs(delta.prompt, delta.tokens, offset)})

    def end_events(self, index: int, end: SequenceEnd) -> Iterable[StreamEvent]:
        yield self._chunk(index, {"text": "", "logprobs": None}, end.reason)

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
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def token_logprobs(tokenizer: Any, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
    """OpenAI's log probabilities of those tokens for which they were asked."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    return [
        {**one(sampled.token, sampled.logprob), "top_logprobs": [one(*likely) for likely in sampled.top_logprobs]}
        for sampled in tokens
        if sampled.logprob is not None
    ]


class EmbeddingResponseWriter(ResponseWriter):
    """Responses of `/v1/embeddings`, which are never streamed."""

    def __init__(self, model: str, is_base64: bool) -> None:
        self._model = model
        self._is_base64 = is_base64

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        found = [
            {"object": "embedding", "index": index, "embedding": self._encoded(answer.embedding)}
            for index, answer in enumerate(answers)
        ]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": found, "model": self._model, "usage": tokens}

    def _encoded(self, vector: Sequence[float]) -> Sequence[float] | str:
        return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if self._is_base64 else vector


def new_id(kind: str, separator: str = "_") -> str:
    """A random id, such as `call_5f…`."""
    return f"{kind}{separator}{secrets.token_hex(ID_BYTES)}"


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


async def stream_response(
    group: SequenceGroup, writer: ResponseWriter, with_details: bool
) -> AsyncGenerator[StreamEvent]:
    """The response piece by piece, with its details as events named `swarm` if they are requested.

    Raises:
        SwarmError: the response cannot be completed.
    """
    answers = [AccumulatedAnswer() for _ in range(len(group))]
    started: set[int] = set()
    async with aclosing(group.events()) as events:
        async for index, event in events:
            if not isinstance(event, SequenceDelta | SequenceEnd):
                if with_details and (detail := _detail(index, event)) is not None:
                    yield StreamEvent(detail, "swarm")
                continue
            if index not in started:
                started.add(index)
                for written in writer.first_events(index, group.usage):
                    yield written
            if isinstance(event, SequenceDelta):
                for written in writer.delta_events(index, event, answers[index]):
                    yield written
                answers[index].add_delta(event)
            else:
                for written in writer.end_events(index, event):
                    yield written
    for written in writer.last_events(group.usage):
        yield written
    if with_details:
        yield StreamEvent(group.summary(), "swarm")


def _detail(index: int, event: SequenceEvent) -> dict[str, Any] | None:
    """What is told of an event that has no output, to clients that ask for details; see `docs/gateway.md`."""
    if isinstance(event, SequenceProvisional):
        return {"kind": "provisional", "index": index, "text": event.text}
    return route_detail(event)


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
            elif isinstance(event, SequenceEmbedding):
                answers[index].embedding = event.vector
            elif isinstance(event, SequenceEnd):
                answers[index].end = event
            elif (detail := route_detail(event)) is not None:
                details.append(detail)
    details.append(group.summary())
    # In a thread: the log probabilities of a long answer are some hundred thousand tokens to decode.
    body = await asyncio.to_thread(writer.body, answers, group.usage)
    return {**body, "swarm": details} if with_details else body
