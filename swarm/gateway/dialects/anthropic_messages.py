"""Anthropic's Messages interface: its requests as chat requests, and answers in its form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from swarm.gateway.dialects.blocks import Block, BlockKind, BlockWriter, typed_event
from swarm.gateway.openai.api_errors import ApiError
from swarm.gateway.openai.dialect import Dialect, StreamEvent
from swarm.gateway.openai.refused_fields import RefusedFields
from swarm.gateway.openai.request_schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionName,
    ImageUrl,
    MessageToolCall,
    ModelName,
    Share,
    StopSequences,
    ToolChoice,
    ToolDefinition,
    TopK,
    check_chat_request,
    decode_request,
    schema_format,
)
from swarm.gateway.openai.response_writers import new_id
from swarm.generation.formats.tool_calls import FunctionNameText, ToolCall, ToolFunction
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_group import Usage

CHANGING_HEADER = "x-anthropic-billing-header:"
"""Begins a part of the system prompt that is another one in each request of some programs, and is not for the model.

It comes first, so that no request could begin with what an earlier one has left.
"""

NO_CONTEXT_EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

MESSAGES: RefusedFields = {
    "container": ((), ""),
    "context_management": ((NO_CONTEXT_EDITS,), ""),
    "mcp_servers": (([],), ""),
    "speed": (("standard",), ""),
}


class _Block(Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content. Hints for a provider's caches are ignored."""

    cache_control: Any = None


class TextBlock(_Block, tag="text"):
    """A text."""

    text: str
    citations: Any = None


class ImageSource(Struct, forbid_unknown_fields=True):
    """Where an image is: in the request, or at an address."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class ImageBlock(_Block, tag="image"):
    """An image."""

    source: ImageSource


class ToolResultBlock(_Block, tag="tool_result"):
    """What a tool call of the model has given."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] = ""
    is_error: Any = None


class ToolUseBlock(_Block, tag="tool_use"):
    """A tool call of the model."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ThinkingBlock(_Block, tag="thinking"):
    """A thought of the model."""

    thinking: str
    signature: Any = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """A thought of another provider's model, which cannot be read here."""

    data: Any = None


AnyBlock = TextBlock | ImageBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class Message(Struct, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class Tool(Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionNameText
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def definition(self) -> ToolDefinition:
        """The same tool as OpenAI's chat completions have it."""
        return ToolDefinition(ToolFunction(self.name, self.description, self.input_schema, self.strict))


class Choice(Struct, forbid_unknown_fields=True):
    """Which tools have to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Struct, forbid_unknown_fields=True):
    """Whether the model thinks. How much is for the model to say."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Any = None
    display: Any = None


class JsonFormat(Struct, forbid_unknown_fields=True):
    """The schema of an answer in JSON."""

    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The form of the answer, and how much the model thinks before."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    model: ModelName
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Change no answer.
    cache_control: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def chat(self) -> ChatRequest:
        """The same request as OpenAI's."""
        choice = self.tool_choice or Choice("auto")
        form = self.output_config.format if self.output_config is not None else None
        named = ToolChoice(FunctionName(choice.name)) if choice.type == "tool" else None
        continues = self.messages[-1].role == "assistant"
        return ChatRequest(
            model=self.model,
            messages=list(_chat_messages(self.system, self.messages)),
            tools=[tool.definition() for tool in self.tools or ()],
            tool_choice=named or {"any": "required", "none": "none"}.get(choice.type, "auto"),  # type: ignore[arg-type]
            parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
            reasoning_effort=_effort(self.thinking, self.output_config),
            response_format=schema_format(form.schema) if form is not None else None,
            continue_final_message=continues,
            add_generation_prompt=not continues,
        )


class MessagesRequest(CountRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31)]
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: TopK | None = None

    def chat(self) -> ChatRequest:
        chat = super().chat()
        chat.max_tokens, chat.stop, chat.stream = self.max_tokens, self.stop_sequences, self.stream
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        return chat


def read_messages_request(body: bytes, kind: type[CountRequest] = MessagesRequest) -> ChatRequest:
    """A request as a chat request.

    Raises:
        BadRequest: it is not valid, or asks for something that is not supported.
    """
    chat = decode_request(kind, body, MESSAGES).chat()
    check_chat_request(chat)
    return chat


def _effort(thinking: Thinking | None, config: OutputConfig | None) -> str | None:
    """How much the model is asked to think, as OpenAI's `reasoning_effort`."""
    if thinking is not None and thinking.type == "disabled":
        return "none"
    effort = config.effort if config is not None else None
    if effort not in (None, "high"):  # which is Anthropic's default
        return effort
    return "medium" if thinking is not None else None


def _chat_messages(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> Iterator[ChatMessage]:
    parts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    if kept := "\n".join(part for part in parts if part and not part.startswith(CHANGING_HEADER)):
        yield ChatMessage("system", kept)
    for message in messages:
        if isinstance(message.content, str):
            yield ChatMessage(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant_message(message.content)
        else:
            yield from _user_messages(message.role, message.content)


def _assistant_message(blocks: Sequence[AnyBlock]) -> ChatMessage:
    calls = [
        MessageToolCall(FunctionCall(block.name, json.dumps(block.input)), block.id)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    return ChatMessage("assistant", text, tool_calls=calls or None, reasoning_content=thought or None)


def _user_messages(role: Literal["user", "system"], blocks: Sequence[AnyBlock]) -> Iterator[ChatMessage]:
    """The results of tools as messages of their own, and what is between them."""
    parts: list[ContentPart] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if parts:
                yield ChatMessage(role, parts)
                parts = []
            content = block.content if isinstance(block.content, str) else [_part(one) for one in block.content]
            yield ChatMessage("tool", content, tool_call_id=block.tool_use_id)
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block))
    if parts:
        yield ChatMessage(role, parts)


def _part(block: TextBlock | ImageBlock) -> ContentPart:
    if isinstance(block, TextBlock):
        return ContentPart("text", block.text)
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return ContentPart("image_url", image_url=ImageUrl(url))


class AnthropicDialect(Dialect):
    """Streams whose events have names, and errors with Anthropic's types."""

    end = b""

    @staticmethod
    def error_body(error: ApiError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def error(self, error: ApiError) -> bytes:
        return self.event(StreamEvent(self.error_body(error), "error"))


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageWriter(BlockWriter):
    """Writes an answer as Anthropic's message.

    Args:
        model: its name.
        context_length: the model's.
    """

    id_prefixes: ClassVar[dict[BlockKind, str]] = {"thought": "thought", "text": "text", "call": "toolu"}

    def __init__(self, model: str, context_length: int) -> None:
        super().__init__()
        self._context_length = context_length
        self._id = new_id("msg")
        self._model = model

    def object(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_content(block) for block in self.blocks],
            **self._stop(usage),
            "usage": _usage(usage),
        }

    def first_events(self, index: int, usage: Usage) -> Iterable[StreamEvent]:
        yield typed_event("message_start", message=self.object(usage))

    def last_events(self, usage: Usage) -> Iterable[StreamEvent]:
        yield typed_event("message_delta", delta=self._stop(usage), usage=_usage(usage))
        yield typed_event("message_stop")

    def _stop(self, usage: Usage) -> dict[str, str | None]:
        if (end := self.end) is None:
            return {"stop_reason": None, "stop_sequence": None}
        is_full = usage.prompt_tokens + usage.new_tokens >= self._context_length
        reasons = {
            "length": "model_context_window_exceeded" if is_full else "max_tokens",
            "tool_calls": "tool_use",
            "stop": "end_turn" if end.stop is None else "stop_sequence",
        }
        return {"stop_reason": reasons[end.reason], "stop_sequence": end.stop}

    def block_start(self, block: Block) -> Iterable[StreamEvent]:
        yield typed_event("content_block_start", index=block.index, content_block=_content(block))

    def block_delta(self, block: Block, more: str, tokens: Sequence[SampledToken]) -> Iterable[StreamEvent]:
        kind, name = {
            "thought": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        yield typed_event("content_block_delta", index=block.index, delta={"type": kind, name: more})

    def block_end(self, block: Block) -> Iterable[StreamEvent]:
        yield typed_event("content_block_stop", index=block.index)


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.content, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.content}
    arguments = ToolCall(block.name, block.content).parsed_arguments
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's, where the tokens that were computed before are apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thought_tokens},
    }
