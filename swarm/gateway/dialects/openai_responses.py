"""OpenAI's Responses interface: its requests as chat requests, and answers in its form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from swarm.gateway.dialects.blocks import Block, BlockKind, BlockWriter, typed_event
from swarm.gateway.openai.api_errors import ApiError, BadRequest
from swarm.gateway.openai.dialect import Dialect, StreamEvent
from swarm.gateway.openai.refused_fields import RefusedFields
from swarm.gateway.openai.request_schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionName,
    ImageUrl,
    MessageToolCall,
    ModelName,
    Share,
    Temperature,
    ToolChoice,
    ToolDefinition,
    check_chat_request,
)
from swarm.gateway.openai.response_writers import AccumulatedAnswer, new_id, token_logprobs
from swarm.generation.formats.tool_calls import FunctionNameText, ToolFunction
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_group import Usage
from swarm.generation.sequence_request import SequenceRequest

LOGPROBS = "message.output_text.logprobs"
"""In `include`: log probabilities are asked for."""

RESPONSES: RefusedFields = {
    "background": ((False,), ""),
    "context_management": (([],), ""),
    "conversation": ((), "use previous_response_id"),
    "prompt": ((), "write it into instructions and input"),
    "truncation": (("disabled",), "leave out what does not fit"),
}


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text", "input_image", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: Any = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


Content = str | list[Part]


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something said or done in the conversation so far."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: Content | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Content = ""
    summary: Any = None
    encrypted_content: Any = None
    namespace: Any = None
    status: Any = None
    phase: Any = None


class Tool(Struct, forbid_unknown_fields=True):
    """A function that the model may call, or a namespace with several of them."""

    type: Literal["function", "namespace"]
    name: FunctionNameText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class NamedTool(Struct, forbid_unknown_fields=True):
    """One of the tools in a tool choice."""

    name: str
    type: Literal["function"] = "function"


class Choice(Struct, forbid_unknown_fields=True):
    """The tool that has to be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(Struct, forbid_unknown_fields=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """What is asked of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """How much the model is asked to think. Thoughts are returned in full, so options about summaries are ignored."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Any = None
    generate_summary: Any = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Changes nothing."""

    include_obfuscation: Any = None


class ResponsesRequest(Struct, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: ModelName
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    # Change no answer.
    client_metadata: Any = None
    max_tool_calls: Any = None

    @property
    def namespaces(self) -> dict[str, str]:
        """The namespaces of those functions that are in one."""
        return {one.name: tool.name for tool in self.tools or () for one in tool.tools or ()}

    @property
    def items(self) -> list[InputItem]:
        """What the request adds to the conversation."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def chat(self, items: Sequence[InputItem]) -> ChatRequest:
        """The same request as a chat request.

        Args:
            items: all of the conversation.

        Raises:
            BadRequest: its fields do not go together.
        """
        with_logprobs = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        chat = ChatRequest(
            model=self.model,
            messages=list(_chat_messages(self.instructions, items)),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[_tool(one) for tool in self.tools or () for one in tool.tools or (tool,)],
            tool_choice=_choice(self.tool_choice) if isinstance(self.tool_choice, Choice) else self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=_response_format(self.text.format) if self.text and self.text.format else None,
            logprobs=with_logprobs,
            top_logprobs=self.top_logprobs if with_logprobs else None,
        )
        check_chat_request(chat)
        if not 0 < len(chat.messages) <= MAX_MESSAGES:
            raise BadRequest(f"a conversation has 1 to {MAX_MESSAGES} messages", param="input")
        return chat


def _tool(tool: Tool) -> ToolDefinition:
    return ToolDefinition(ToolFunction(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: Choice) -> ToolChoice:
    if choice.type == "function":
        return ToolChoice(FunctionName(choice.name))
    tools = [AllowedTool(FunctionName(tool.name)) for tool in choice.tools or ()]
    return ToolChoice(allowed_tools=AllowedTools(tools, choice.mode), type="allowed_tools")


def _response_format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"schema": asked.schema, "strict": asked.strict}}


def _chat_messages(instructions: str | None, items: Iterable[InputItem]) -> Iterator[ChatMessage]:
    """The conversation. What the model has thought, said and called without a pause is one message."""
    if instructions:
        yield ChatMessage("system", instructions)
    answer: ChatMessage | None = None
    for item in items:
        if item.type == "function_call_output" or (item.type == "message" and item.role != "assistant"):
            if answer is not None:
                yield answer
                answer = None
            if item.type == "message":
                yield ChatMessage(item.role, _content(item.content or ""))
            else:
                yield ChatMessage("tool", _content(item.output), tool_call_id=item.call_id)
            continue
        if answer is None or (item.type != "function_call" and answer.tool_calls):
            if answer is not None:
                yield answer
            answer = ChatMessage("assistant")
        if item.type == "function_call":
            call = MessageToolCall(FunctionCall(item.name, item.arguments), item.call_id)
            answer.tool_calls = [*(answer.tool_calls or ()), call]
        elif item.type == "reasoning":
            answer.reasoning_content = (answer.reasoning_content or "") + _text(item.content or "")
        else:
            answer.content = _text(answer.content or "") + _text(item.content or "")
    if answer is not None:
        yield answer


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def _content(content: Content) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [
        ContentPart("image_url", image_url=ImageUrl(part.image_url or ""))
        if part.type == "input_image"
        else ContentPart("text", part.text or part.refusal)
        for part in content
    ]


class ResponsesDialect(Dialect):
    """Streams whose events have names and numbers."""

    end = b""

    def __init__(self) -> None:
        self._numbers = count()

    def event(self, event: StreamEvent) -> bytes:
        return super().event(StreamEvent({**event.body, "sequence_number": next(self._numbers)}, event.name))

    def error(self, error: ApiError) -> bytes:
        """OpenAI's error event, and the object that makes its clients raise an error."""
        body = error.body()
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        return self.event(StreamEvent({"type": "error", **told, **body}, "error"))


class ResponsesWriter(BlockWriter):
    """Writes an answer as OpenAI's response.

    Args:
        request: what was asked.
        sequence: what was made of it.
        tokenizer: the model's, for log probabilities.
        keep: called with the response when it is complete.
    """

    id_prefixes: ClassVar[dict[BlockKind, str]] = {"thought": "rs", "text": "msg", "call": "fc"}

    def __init__(
        self,
        request: ResponsesRequest,
        sequence: SequenceRequest,
        tokenizer: Any,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._id = new_id("resp")
        self._created = int(time.time())
        self._request = request
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._keep = keep

    def object(self, usage: Usage) -> dict[str, Any]:
        asked, end = self._request, self.end
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if end is not None else None,
            "status": "in_progress" if end is None else "incomplete" if end.reason == "length" else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if end and end.reason == "length" else None,
            "error": None,
            "model": asked.model,
            "output": [self._item(block) for block in self.blocks],
            "usage": _usage(usage) if end is not None else None,
            "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "temperature": 1.0 if self._sequence.temperature is None else self._sequence.temperature,
            "top_p": 1.0 if self._sequence.top_p is None else self._sequence.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_logprobs": asked.top_logprobs or 0,
            "tools": [structs.asdict(tool) for tool in asked.tools or ()],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": asked.text or TextOptions(TextFormat()),
            "reasoning": asked.reasoning or Reasoning(),
            "store": asked.store is not False,
            "metadata": asked.metadata or {},
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
        }

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        return self._kept(super().body(answers, usage))

    def first_events(self, index: int, usage: Usage) -> Iterable[StreamEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield typed_event(kind, response=self.object(usage))

    def last_events(self, usage: Usage) -> Iterable[StreamEvent]:
        response = self._kept(self.object(usage))
        yield typed_event(f"response.{response['status']}", response=response)

    def block_start(self, block: Block) -> Iterable[StreamEvent]:
        empty = {"content": [], "status": "in_progress"} if block.kind != "call" else {"status": "in_progress"}
        yield typed_event("response.output_item.added", output_index=block.index, item={**self._item(block), **empty})
        if block.kind != "call":
            yield typed_event("response.content_part.added", **_place(block), part=self._part(block))

    def block_delta(self, block: Block, more: str, tokens: Sequence[SampledToken]) -> Iterable[StreamEvent]:
        logprobs = token_logprobs(self._tokenizer, tokens)  # decoded once: the events below repeat them
        block.logprobs += logprobs
        new = {"logprobs": logprobs} if block.kind == "text" else {}
        yield typed_event(f"{EVENTS[block.kind]}.delta", **_place(block), delta=more, **new)

    def block_end(self, block: Block) -> Iterable[StreamEvent]:
        name = "arguments" if block.kind == "call" else "text"
        all_of = {"logprobs": block.logprobs} if block.kind == "text" else {}
        yield typed_event(f"{EVENTS[block.kind]}.done", **_place(block), **{name: block.content}, **all_of)
        if block.kind != "call":
            yield typed_event("response.content_part.done", **_place(block), part=self._part(block))
        yield typed_event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response, which later requests may name."""
        if self._request.store is not False:
            self._keep(response)
        return response

    def _item(self, block: Block) -> dict[str, Any]:
        head = {"id": block.id, "status": "completed" if block.is_whole else "incomplete"}
        if block.kind == "call":
            call_id = f"call_{block.id.partition('_')[2]}"
            call = {"call_id": call_id, "name": block.name, "arguments": block.content}
            space = self._request.namespaces.get(block.name)
            return {"type": "function_call", **head, **call, **({"namespace": space} if space else {})}
        content = {"content": [self._part(block)]}
        if block.kind == "thought":
            return {"type": "reasoning", **head, "summary": [], **content}
        return {"type": "message", **head, "role": "assistant", **content}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.content}
        return {"type": "output_text", "text": block.content, "annotations": [], "logprobs": [*block.logprobs]}


EVENTS: dict[BlockKind, str] = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def _place(block: Block) -> dict[str, Any]:
    """Where a block, or the only part of its content, is in the response."""
    place = {"item_id": block.id, "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
    }
