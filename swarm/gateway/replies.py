"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.gateway.generation import Delta
from swarm.generation.sampling import Chosen, token_text
from swarm.generation.tool_calls import ToolCall


@dataclass
class Answer:
    """One of the answers of a request, as it grows."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Chosen] = field(default_factory=list)
    reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.calls.extend(delta.calls)
        self.tokens.extend(delta.tokens)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def usage(prompt: int, completion: int) -> dict[str, int]:
    """How many tokens a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Replies:
    """Writes the answers to one request.

    Args:
        model: its name.
        tokenizer: the model's, for log probabilities.
        prompts: texts in front of the answers, if they were asked to be repeated.
        tells_usage: whether a stream ends with what the request took; then the other chunks say that it is not known.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, model: str, tokenizer: Any, prompts: Sequence[str] = (), *, tells_usage: bool = False) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._created = int(time.time())
        self._unknown_usage: dict[str, None] = {"usage": None} if tells_usage else {}

    def whole(self, answers: Sequence[Answer], used: dict[str, int]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        choices = [
            {"index": index, **self._choice(index, answer), "finish_reason": answer.reason}
            for index, answer in enumerate(answers)
        ]
        return {**self._frame(self.whole_kind), "choices": choices, "usage": used}

    def first(self, index: int) -> dict[str, Any] | None:
        """A chunk in front of the first one, if there is any."""
        raise NotImplementedError

    def chunk(self, index: int, delta: Delta, before: Answer) -> dict[str, Any]:
        """What came of an answer; `before` is what came before."""
        raise NotImplementedError

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """The chunk that says that an answer is complete."""
        raise NotImplementedError

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def used(self, used: dict[str, int]) -> dict[str, Any]:
        """The chunk that tells what the request took."""
        return {**self._frame(self.chunk_kind), "choices": [], "usage": used}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _piece(self, index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": reason}
        return {**self._frame(self.chunk_kind), "choices": [choice], **self._unknown_usage}


class ChatReplies(Replies):
    """Answers of `/v1/chat/completions`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def chunk(self, index: int, delta: Delta, before: Answer) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            count = len(before.calls)
            content["tool_calls"] = [{"index": count + i, **_call(call)} for i, call in enumerate(delta.calls)]
        return self._piece(index, {"delta": content, "logprobs": self._logprobs(delta.tokens)})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return self._piece(index, {"delta": {}, "logprobs": None}, reason)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["content"] = answer.text.strip() or None
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {"message": message, "logprobs": self._logprobs(answer.tokens)}

    def _logprobs(self, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        told = [chosen for chosen in tokens if chosen.logprob is not None]
        if not told:
            return None
        return {
            "content": [
                {
                    **self._one(chosen.token, chosen.logprob or 0.0),
                    "top_logprobs": [self._one(token, logprob) for token, logprob in chosen.likeliest],
                }
                for chosen in told
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(self._tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}


class TextReplies(Replies):
    """Answers of `/v1/completions`."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def first(self, index: int) -> dict[str, Any] | None:
        return self._piece(index, {"text": self._prompts[index], "logprobs": None}) if self._prompts else None

    def chunk(self, index: int, delta: Delta, before: Answer) -> dict[str, Any]:
        return self._piece(index, {"text": delta.text, "logprobs": self._logprobs(delta.tokens, len(before.text))})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return self._piece(index, {"text": "", "logprobs": None}, reason)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        front = self._prompts[index] if self._prompts else ""
        return {"text": front + answer.text, "logprobs": self._logprobs(answer.tokens, 0)}

    def _logprobs(self, tokens: Sequence[Chosen], offset: int) -> dict[str, Any] | None:
        told = [chosen for chosen in tokens if chosen.logprob is not None]
        if not told:
            return None
        texts = [token_text(self._tokenizer, chosen.token)[0] for chosen in told]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(chosen.logprob or 0.0) for chosen in told],
            "top_logprobs": [
                {token_text(self._tokenizer, token)[0]: _finite(logprob) for token, logprob in chosen.likeliest}
                for chosen in told
            ],
            "text_offset": offsets,
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finite(logprob: float) -> float:
    """JSON knows no infinity; OpenAI says -9999 for what cannot be."""
    return max(logprob, -9999.0)
