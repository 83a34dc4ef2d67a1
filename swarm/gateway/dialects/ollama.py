"""Ollama's interface: its requests as OpenAI's, and answers and models in its form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import ApiError
from swarm.gateway.openai.dialect import Dialect, StreamEvent
from swarm.gateway.openai.refused_fields import RefusedFields, unsupported
from swarm.gateway.openai.request_schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    UNLIMITED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    ImageUrl,
    MessageToolCall,
    ModelName,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    StopSequence,
    StopSequences,
    Temperature,
    ToolDefinition,
    TopK,
    check_chat_request,
    schema_format,
)
from swarm.gateway.openai.response_writers import AccumulatedAnswer, ResponseWriter, token_logprobs
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sequence_generation import SequenceEnd
from swarm.generation.sequence_group import Usage
from swarm.generation.sequence_output import SequenceDelta
from swarm.generation.served_model import ServedModel

INTERFACE_VERSION = "0.13.0"
"""Of the interface, which some clients compare with the one that they need."""

ANY_TAG = ":latest"
"""What clients append to a name without a tag."""

NEVER = datetime(9999, 1, 1, tzinfo=UTC)

OLLAMA: RefusedFields = {
    "context": (([],), "use /api/chat with the messages so far"),
    "height": ((), ""),
    "shift": ((True, False), ""),
    "steps": ((), ""),
    "suffix": (("",), ""),
    "template": (("",), "the model's own is used"),
    "truncate": ((True, False), ""),
    "width": ((), ""),
}


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the answer is sampled. What they leave out is as the model's authors set it."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopSequence | StopSequences | None = None
    # Refused, unless they change nothing.
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    # About how Ollama computes, or about the options above.
    f16_kv: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    num_batch: Any = None
    num_ctx: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None
    use_mlock: Any = None
    use_mmap: Any = None
    vocab_only: Any = None

    def fields(self) -> dict[str, Any]:
        """The same as fields of OpenAI's requests.

        Raises:
            BadRequest: one is not supported.
        """
        for name, neutral in {"mirostat": 0, "tfs_z": 1, "typical_p": 1}.items():
            if getattr(self, name) not in (None, neutral):
                raise unsupported(f"options.{name}")
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in names},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": UNLIMITED if limit is None or limit < 0 else limit,
        }


class CalledFunction(Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: str
    arguments: dict[str, Any] = {}
    index: Any = None


class Call(Struct, forbid_unknown_fields=True):
    """A tool call in the conversation so far."""

    function: CalledFunction
    id: str = ""
    type: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def chat(self) -> ChatMessage:
        """The same message as OpenAI's."""
        calls = [
            MessageToolCall(FunctionCall(call.function.name, json.dumps(call.function.arguments)), call.id)
            for call in self.tool_calls or ()
        ]
        return ChatMessage(
            self.role,
            _content(self.content or "", self.images),
            name=self.tool_name,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )


class OllamaRequest(Struct, kw_only=True):
    """What the requests of both endpoints have in common."""

    model: ModelName
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def served_name(self) -> str:
        """The model's name without the tag that clients append."""
        return self.model.removesuffix(ANY_TAG)

    def common(self) -> dict[str, Any]:
        """As fields of OpenAI's requests."""
        return {
            **(self.options or Options()).fields(),
            "model": self.served_name,
            "stream": self.stream is not False,
            "response_format": _response_format(self.format),
        }

    def conversation(self, messages: Sequence[ChatMessage], tools: list[ToolDefinition] | None = None) -> ChatRequest:
        """The same request as a chat request.

        Raises:
            BadRequest: its fields do not go together.
        """
        chat = ChatRequest(
            **self.common(),
            messages=list(messages),
            tools=tools,
            reasoning_effort=self._effort(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
        )
        check_chat_request(chat)
        return chat

    def _effort(self) -> str | None:
        """How much the model is asked to think, as OpenAI's `reasoning_effort`."""
        if isinstance(self.think, bool):
            return "medium" if self.think else "none"
        return self.think


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None

    def openai(self) -> ChatRequest | None:
        """The same request as OpenAI's; None if the model should only be loaded."""
        return self.conversation([one.chat() for one in self.messages], self.tools) if self.messages else None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None

    def openai(self) -> ChatRequest | CompletionRequest | None:
        """The same request as OpenAI's; None if the model should only be loaded."""
        if not self.prompt:
            return None
        if self.raw:
            if self.images:
                raise unsupported("images", "leave raw out")
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionRequest(**self.common(), prompt=self.prompt, logprobs=logprobs)
        system = [ChatMessage("system", self.system)] if self.system else []
        return self.conversation([*system, ChatMessage("user", _content(self.prompt, self.images))])


class ShowRequest(Struct):
    """The body of `POST /api/show`."""

    model: str = ""
    name: str = ""  # of older clients

    @property
    def served_name(self) -> str:
        return (self.model or self.name).removesuffix(ANY_TAG)


def _content(text: str, images: Sequence[str] | None) -> str | list[ContentPart]:
    if not images:
        return text
    urls = (f"data:image/png;base64,{image}" for image in images)  # of which type it is, its bytes say
    return [*(ContentPart("image_url", image_url=ImageUrl(url)) for url in urls), ContentPart("text", text)]


def _response_format(asked: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not asked:
        return None
    return schema_format(asked) if isinstance(asked, dict) else {"type": "json_object"}


class OllamaDialect(Dialect):
    """Streams of lines, each of which is an object in JSON. Blanks in front of one are a sign of life."""

    media_type = "application/x-ndjson"
    keep_alive = b" "
    end = b""

    @staticmethod
    def error_body(error: ApiError) -> dict[str, Any]:
        return {"error": str(error)}

    def event(self, event: StreamEvent) -> bytes:
        return msgspec.json.encode(event.body) + b"\n"


class OllamaWriter(ResponseWriter):
    """Writes a single answer as Ollama's.

    Args:
        model: its name.
        tokenizer: the model's, for log probabilities.
        is_chat: whether the answer is a message, rather than a text.
    """

    def __init__(self, model: str, tokenizer: Any, is_chat: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._end: SequenceEnd | None = None
        self._calls = 0

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        self._end = answer.end
        whole = answer.as_delta()
        if whole.calls:
            whole = replace(whole, text=whole.text.strip())
        return {**self._piece(whole), **self._last(usage)}

    def delta_events(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> Iterable[StreamEvent]:
        yield StreamEvent({**self._piece(delta), "done": False})

    def end_events(self, index: int, end: SequenceEnd) -> Iterable[StreamEvent]:
        self._end = end
        return ()

    def last_events(self, usage: Usage) -> Iterable[StreamEvent]:
        yield StreamEvent({**self._piece(SequenceDelta("")), **self._last(usage)})

    def loaded(self) -> dict[str, Any]:
        """The answer to a request that asks nothing, but that the model be loaded, which it is."""
        return {**self._piece(SequenceDelta("")), "done": True, "done_reason": "load"}

    def _piece(self, delta: SequenceDelta) -> dict[str, Any]:
        content: dict[str, Any] = {"content" if self._is_chat else "response": delta.text}
        if delta.thought:
            content["thinking"] = delta.thought
        if delta.calls:
            content["tool_calls"] = list(self._tool_calls(delta.calls))
        logprobs = token_logprobs(self._tokenizer, delta.tokens)
        return {
            "model": self._model,
            "created_at": datetime.now(UTC).isoformat(),
            **({"message": {"role": "assistant", **content}} if self._is_chat else content),
            **({"logprobs": logprobs} if logprobs else {}),
        }

    def _tool_calls(self, calls: Iterable[ToolCall]) -> Iterator[dict[str, Any]]:
        for call in calls:
            yield {"function": {"index": self._calls, "name": call.name, "arguments": call.parsed_arguments}}
            self._calls += 1

    def _last(self, usage: Usage) -> dict[str, Any]:
        first = usage.first_token_seconds if usage.first_token_seconds is not None else usage.seconds
        return {
            "done": True,
            "done_reason": "length" if self._end is not None and self._end.reason == "length" else "stop",
            "total_duration": _nanoseconds(usage.seconds),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": usage.new_tokens,
            "eval_duration": _nanoseconds(usage.seconds - first),
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def listed_model(served: ServedModel) -> dict[str, Any]:
    """A model in a list, such as that of `/api/tags`. Its size is that of what this process holds."""
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": served.created_at,
        "size": sum(weights.nbytes for weights in served.model.parameters()),
        "digest": served.fingerprint,
        "details": _details(served),
    }


def running_model(served: ServedModel) -> dict[str, Any]:
    """A model in the list of `/api/ps`."""
    context = {"context_length": served.context_length}
    return {**listed_model(served), "expires_at": NEVER.isoformat(), "size_vram": 0, **context}


def shown_model(served: ServedModel) -> dict[str, Any]:
    """What `/api/show` tells of a model."""
    config = served.model.config.get_text_config()
    family = str(config.model_type)
    can = {
        "tools": served.tool_syntax is not None,
        "thinking": served.thinking_syntax is not None,
        "vision": not served.no_images,
    }
    return {
        "modified_at": served.created_at,
        "template": served.chat_template or "",
        "details": _details(served),
        "model_info": {
            "general.architecture": family,
            "general.basename": served.name,
            f"{family}.context_length": served.context_length,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": served.model.swarm.blocks,
        },
        "capabilities": ["completion", *(name for name, is_there in can.items() if is_there)],
    }


def _details(served: ServedModel) -> Mapping[str, Any]:
    family = str(served.model.config.get_text_config().model_type)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
